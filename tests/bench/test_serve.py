"""`pykernels bench serve` against a scripted server on a real socket."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.serving import beside
from bench.serving.client import Outcome
from bench.serving.figures import figures
from bench.serving.workload import Load, plan
from model.cli.app import app

INF = float("inf")


@dataclass
class Script:
    """How the server behaves, and what it was asked."""

    tokenizes: bool = True
    unknown: tuple[str, ...] = ()
    """Fields that are an error 400."""
    first: float = 0.0
    """Seconds before the first token, and before each further one."""
    gap: float = 0.0
    key: str | None = None
    failures: dict[int, int | str] = field(default_factory=dict)
    """Of the n-th completion, warm-up not counted: a status, or what happens to its stream."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def timed(self) -> list[dict[str, Any]]:
        return [body for body in self.asked if body["max_tokens"] != 2]


def handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def reply(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if script.key and self.headers["Authorization"] != f"Bearer {script.key}":
                return self.reply(401, {"error": {"message": "no key"}})
            self.reply(200, {"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                if not script.tokenizes:
                    return self.reply(404, {})
                return self.reply(200, {"tokens": [len(w) for w in body["prompt"].split()] + [77]})
            if any(name in body for name in script.unknown):
                return self.reply(400, {"error": {"message": "unknown field"}})
            with script.lock:
                how = script.failures.get(len(script.timed)) if body["max_tokens"] != 2 else None
                script.asked.append(body)
                script.at_once += 1
                script.most_at_once = max(script.most_at_once, script.at_once)
            try:
                if isinstance(how, int):
                    self.reply(how, {"error": {"message": f"status {how}"}})
                else:
                    self.stream(body, how)
            except OSError:
                pass  # the client went away
            finally:
                with script.lock:
                    script.at_once -= 1

        def stream(self, body: dict[str, Any], how: str | None) -> None:
            self.send_response(200)
            self.end_headers()
            for i in range(body["max_tokens"]):
                time.sleep(script.gap if i else script.first)
                self.event({"choices": [{"text": f" {i}"}]})
                if how == "breaks":
                    return
                if how == "fails":
                    return self.event({"error": {"message": "out of pages"}})
            prompt = body["prompt"]
            # Two tokens a word, as a tokenizer might.
            count = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())
            usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
            usage["prompt_tokens_details"] = {"cached_tokens": count // 4}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, event: Any) -> None:
            self.wfile.write(f": silence\n\ndata: {json.dumps(event)}\n\n".encode())

    return Handler


Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """`bench(script, *options)`: the row of a run against it."""
    servers: list[ThreadingHTTPServer] = []

    def run(script: Script, *options: str) -> dict[str, Any]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(script))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--json", *options])
        if result.exit_code:
            return {"code": result.exit_code, "error": result.stderr}
        row: dict[str, Any] = json.loads(result.stdout)
        return row

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


SIZE = ("--requests", "6", "--prompt", "10", "--tokens", "4")


def test_a_closed_loop_counts_and_times_every_answer(bench: Bench) -> None:
    script = Script(first=0.03, gap=0.01)
    limits = "--ttft-limit", "60", "--itl-limit", "5"
    row = bench(script, *SIZE, "--clients", "2", "--shared-prefix", "3", *limits)
    assert (row["completed"], row["errors"], row["refused_429"]) == (6, 0, 0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (60, 24)
    assert row["cached_share"] == 12 / 60  # ten tokens, a quarter of each
    assert row["model"] == "scripted" and row["token_ids"] and row["ignore_eos"]
    assert script.most_at_once == 2
    prompts = [body["prompt"] for body in script.timed]
    assert {len(ids) for ids in prompts} == {10} and len({tuple(ids[:3]) for ids in prompts}) == 1
    assert len({tuple(ids) for ids in prompts}) == 6
    assert {id for ids in prompts for id in ids} <= {2, 4, 6, 77}  # those of /tokenize
    # Nothing comes before the server has slept.
    assert row["ttft_ms_p50"] >= 30 and row["e2e_ms_p50"] >= 60 and row["seconds"] >= 0.18
    assert row["ttft_ms_p50"] <= row["ttft_ms_p90"] <= row["ttft_ms_p99"] <= row["e2e_ms_p99"]
    assert row["good"] == 0  # 10 ms a token are over the limit
    assert row["output_tok_s"] == pytest.approx(24 / row["seconds"])


def test_a_server_that_knows_less_is_asked_for_less(bench: Bench) -> None:
    script = Script(tokenizes=False, unknown=("ignore_eos",))
    row = bench(script, *SIZE)
    assert row["completed"] == 6 and not row["token_ids"] and not row["ignore_eos"]
    # The warm-up has shown two tokens a word: half the words are ten tokens.
    assert {len(body["prompt"].split()) for body in script.timed} == {5}
    assert row["prompt_tokens"] == 60 and "ignore_eos" not in script.timed[0]


def test_refusals_errors_and_cancels_are_told_apart(bench: Bench) -> None:
    script = Script(failures={0: 429, 1: 500, 2: "breaks", 3: "fails"})
    row = bench(script, *SIZE, "--clients", "1")
    assert (row["completed"], row["refused_429"], row["errors"]) == (2, 1, 3)
    script = Script(gap=0.01)
    row = bench(script, *SIZE, "--cancel", "0.5", "--seed", "3")
    assert (row["completed"], row["cancelled"], row["errors"]) == (3, 3, 0)
    assert row["output_tokens"] == 12


def test_arrivals_do_not_wait_for_answers(bench: Bench) -> None:
    script = Script(first=1.0)
    row = bench(script, *SIZE, "--rate", "1000", "--seed", "1")
    assert script.most_at_once == 6 and row["completed"] == 6
    # With one place the second waits for the first, and its time starts when it arrives.
    script = Script(first=0.1)
    row = bench(script, *SIZE, "--rate", "1000", "--clients", "1", "--seed", "1")
    assert script.most_at_once == 1
    assert row["ttft_ms_p99"] > 400


def test_arrivals_are_poisson_and_a_seed_repeats_them() -> None:
    load = Load(4000, 5.0, None, 1, 2, 0, 0.25, 7)
    drawn = plan(load, [1, 2, 3])
    gaps = [b.at - a.at for a, b in zip(drawn, drawn[1:], strict=False)]
    # Exponential: mean and deviation are both 1 / rate.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert sum(one.cancel_after is not None for one in drawn) == 1000
    assert drawn == plan(load, [1, 2, 3])


def test_figures_are_those_of_the_answers() -> None:
    load = Load(4, INF, 4, 8, 3, 0, 0.0, 1)
    outcomes = [
        Outcome(0.0, 200, "", False, [t, t + 0.1, t + 0.3], t + 0.3, 8, 3, 0)
        for t in (1.0, 2.0, 3.0)
    ]
    outcomes.append(Outcome(0.0, 200, "", False, [4.0, 4.5, 5.0], 10.0, 8, 3, 0))
    row = figures(load, outcomes, ttft_limit=2.5, itl_limit=200)
    assert row["ttft_ms_p50"] == 2500 and row["itl_ms_p50"] == pytest.approx(200)
    assert row["tpot_ms_p50"] == pytest.approx(150) and row["e2e_ms_p99"] < 10_000
    assert (row["good"], row["goodput_requests_s"]) == (2, 0.2)
    assert (row["input_tok_s"], row["output_tok_s"], row["requests_s"]) == (3.2, 1.2, 0.4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "no --url is given"),
        (("--url", "ftp://host"), "is no URL"),
        (("--url", "http://127.0.0.1:1"), "cannot be reached"),
        (("--url", "http://host", "--rate", "0"), "--rate 0"),
        (("--url", "http://host", "--cancel", "2"), "--cancel 2"),
        (("--url", "http://host", "--shared-prefix", "513"), "longer than prompts of 512"),
        (("--url", "http://host", "--itl-limit", "nan"), "--itl-limit nan"),
    ],
)
def test_bad_input_is_one_line(options: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    assert result.exit_code == 2 and says in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_server_s_key(bench: Bench, tmp_path: Path) -> None:
    assert "401: no key" in bench(Script(key="secret"), *SIZE)["error"]
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert bench(Script(key="secret"), *SIZE, "--api-key-file", str(file))["completed"] == 6


def test_servers_in_turns_that_are_stopped_tell_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter([10.0, 5.0, 20.0])

    async def driven(*_: Any) -> dict[str, float]:
        rate = next(turns, None)
        if rate is None:
            raise KeyboardInterrupt
        times = dict.fromkeys(("ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50"), 1.0)
        return {"output_tok_s": rate, **times}

    monkeypatch.setattr(beside, "_driven", driven)
    monkeypatch.setattr(beside, "model_file", lambda *_, **__: Path("model.gguf"))
    for server in ("ServerProcess", "LlamaServer"):
        monkeypatch.setattr(beside, server, lambda *_: nullcontext(Running()))
    assert beside.main(["--json", "--rounds", "3"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["missing"]) == (False, ["round 2", "round 3"])
    assert [found[name]["output_tok_s"] for name in (beside.OURS, beside.PEER)] == [10, 5]


class Running:
    url = "http://127.0.0.1:1"
