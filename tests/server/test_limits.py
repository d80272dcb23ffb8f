"""Keys, limits, clients that go away, and a server that ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from model.server.http.errors import ApiError
from model.server.http.settings import ServerSettings
from model.server.serving.admission import Admission, Turns
from pykernels.errors import PykernelsError

from .conftest import NAME, Running, Script, Scripted, soon

ROOT = Path(__file__).resolve().parents[2]
LONG = "x" * 2000


def held(server: Running) -> threading.Event:
    assert isinstance(server.llm.runner, Scripted)
    return server.llm.runner.held


def ask(server: Running, **settings: Any) -> Any:
    return server.openai().completions.create(
        model=NAME, prompt="go on", max_tokens=1000, **settings
    )


def test_a_key_opens_every_route(scripted: Script) -> None:
    server = scripted(["a"], api_key="secret")
    paths = server.http().get("/openapi.json").json()["paths"]
    with httpx2.Client(base_url=server.url) as stranger:
        for path, methods in paths.items():
            for method in methods:
                status = stranger.request(method, path).status_code
                assert status == (200 if path == "/health" else 401), path
        wrong = stranger.get("/v1/models", headers={"x-api-key": "secreT"})
        assert wrong.status_code == 401
        assert stranger.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
    assert server.openai().models.list().data
    assert server.anthropic().models.list().data


def test_bodies_are_limited_in_size_and_pace(scripted: Script) -> None:
    server = scripted(["a"], max_body_bytes=2048, body_seconds=1.0)
    with server.http() as http:
        whole = http.post("/v1/completions", json={"prompt": LONG * 2})
        chunked = http.post("/v1/completions", content=iter([b'{"prompt": "', b"x" * 4000]))
        assert (whole.status_code, chunked.status_code) == (413, 413)
        assert http.post("/v1/completions", content=b'"\xff"').status_code == 400
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert half.recv(100).startswith(b"HTTP/1.1 408")


def half_a_head(server: Running) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
    return connection


def test_connections_without_a_request_hold_up_nobody(scripted: Script) -> None:
    server = scripted(["a"], max_requests=8, head_seconds=2.0, max_head_bytes=4096)
    with server.http() as http, ExitStack() as stack:
        assert http.get("/health").status_code == 200  # on a connection that is kept
        halves = [stack.enter_context(half_a_head(server)) for _ in range(40)]
        assert http.get("/health").status_code == 200
        assert ask(server).choices[0].text == "a"
        assert halves[-1].recv(100).startswith(b"HTTP/1.1 408")
        large = stack.enter_context(half_a_head(server))
        large.sendall(b"x" * 5000)
        assert large.recv(100).startswith(b"HTTP/1.1 431")


def test_one_request_too_many_is_503_but_for_health(scripted: Script) -> None:
    server = scripted([LONG], max_requests=1)
    held(server).set()
    with ThreadPoolExecutor(1) as others, server.http() as http:
        waiting = others.submit(ask, server)
        assert soon(lambda: http.get("/v1/models").status_code == 503)
        assert "1 requests" in http.get("/v1/models").json()["error"]["message"]
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        held(server).clear()
        waiting.result()


def test_this_machines_names_and_heads_without_bodies(scripted: Script) -> None:
    server = scripted(["a"])
    with server.http() as http:
        assert http.get("/v1/models", headers={"Host": "LOCALHOST:80"}).status_code == 200
        for path in ("/health", "/", "/v1/models"):
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
            assert int(answer.headers["content-length"]) == len(http.get(path).content)
        assert http.head("/v1/completions").status_code == 405


def test_pages_of_others_are_refused(scripted: Script) -> None:
    server = scripted(["a"], cors_origins=("https://mine.example",))
    with server.http() as http:
        for headers, status in (
            ({"Origin": server.url}, 200),
            ({"Origin": "https://mine.example"}, 200),
            ({"Origin": "https://other.example"}, 403),
            ({"Host": "rebound.example:8080"}, 403),
        ):
            assert http.get("/v1/models", headers=headers).status_code == status, headers
        asked = {"Origin": "https://mine.example", "Access-Control-Request-Method": "POST"}
        allowed = http.options("/v1/models", headers=asked).headers
        assert allowed["Access-Control-Allow-Origin"] == "https://mine.example"


def test_beyond_the_queue_is_429_until_there_is_room(scripted: Script) -> None:
    server = scripted([LONG, LONG, "short"], max_num_seqs=1, max_waiting=1)
    held(server).set()
    with ThreadPoolExecutor(2) as others:
        waiting = [others.submit(ask, server) for _ in range(2)]
        assert soon(lambda: server.inside() == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(server)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            ask(server, n=2)
        held(server).clear()
        assert [one.result().usage.completion_tokens for one in waiting] == [1000, 1000]
    assert ask(server).choices[0].text == "short"


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_goes_away_is_cancelled(scripted: Script, stream: bool) -> None:
    server = scripted([LONG])
    body = {"prompt": "go on", "max_tokens": 5000, "stream": stream}
    held(server).set()
    with server.http() as http:
        if stream:
            held(server).clear()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                held(server).set()
        else:
            with pytest.raises(httpx2.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.5)
    assert soon(lambda: server.inside() == 0)
    held(server).clear()
    assert server.idle() and server.llm.engine.stats.new_tokens < 1500


def test_silence_is_filled_with_comments(scripted: Script) -> None:
    server = scripted(["abc"], silence_seconds=0.05)
    held(server).set()
    body = {"prompt": "go on", "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line).startswith(":")
        held(server).clear()
        rest = [line for line in lines if line.startswith("data:")]
    assert rest[-1] == "data: [DONE]"


def test_a_failed_step_is_an_error_of_its_requests_alone(scripted: Script) -> None:
    server = scripted(["abc", "abc", "abc"])
    assert isinstance(server.llm.runner, Scripted)
    server.llm.runner.fail_next = RuntimeError("no more memory")
    with pytest.raises(openai.InternalServerError, match="no more memory"):
        ask(server)
    server.llm.runner.fail_next = RuntimeError("no more memory")
    with pytest.raises(openai.APIError, match="no more memory"):
        list(ask(server, stream=True))
    assert ask(server).choices[0].text == "abc"


def test_a_burst_of_one_client_does_not_hold_up_another() -> None:
    now = 0.0
    turns = Turns(lambda: now)
    burst = [turns.take("a") for _ in range(4)]
    assert burst == [0, 1, 2, 3] and turns.take("b") == 0
    now = 2.0
    orders = [*burst, now + turns.take("a")]
    assert orders == sorted(orders), "its own requests keep their order"
    for _ in range(5):
        turns.leave("a")
    assert turns.take("a") == 0


def test_the_wait_is_estimated_from_the_last_requests() -> None:
    admission = Admission(2, ServerSettings(max_ttft=10, max_waiting=8))
    admission.took(8.0)
    with admission.entered("a"), admission.entered("b"):
        assert admission.estimate() == 4.0  # the first of two seats is free after half of 8 s
        with admission.entered("c"), pytest.raises(ApiError) as refused:
            with admission.entered("d"), admission.entered("e"):
                pass
        assert refused.value.status_code == 429
    assert admission.estimate() == 0.0


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(PykernelsError, match="max_waiting=-1"):
        ServerSettings(max_waiting=-1)


def test_what_does_not_end_in_time_ends_with_an_error(scripted: Script) -> None:
    """In each API's words, streamed or not; until then whoever asks is told not to come."""
    import anthropic  # 2 s, for the worker that needs it

    server = scripted([LONG] * 5, drain_seconds=2.0)
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "go on"}]}
    held(server).set()
    claude, gpt = server.anthropic().messages.create, server.openai().chat.completions.create
    respond = server.openai().responses.create
    with ThreadPoolExecutor(5) as others, server.http() as http:
        whole = [
            others.submit(claude, **asked, max_tokens=2000),
            others.submit(gpt, **asked),
        ]
        streams = [
            others.submit(lambda: list(claude(**asked, max_tokens=2000, stream=True))),
            others.submit(lambda: list(gpt(**asked, stream=True))),
        ]
        events = others.submit(lambda: list(respond(model=NAME, input="go on", stream=True)))
        assert soon(lambda: server.inside() == 5)
        assert server.server is not None
        server.server.handle_exit(signal.SIGTERM, None)
        assert http.get("/ready").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        for one in whole:
            error: Any = one.exception()
            assert error.status_code == 503 and "about to end" in str(error)
            assert "type" in error.body.get("error", error.body)
        for one in streams:
            cut = one.exception()
            assert isinstance(cut, (anthropic.APIError, openai.APIError)), cut
            assert "about to end" in str(cut)
        assert events.result()[-1].type == "response.failed"
        held(server).clear()


def test_sigterm_lets_what_runs_end() -> None:
    args = ["serve", "--port", "0", "--kernel", "generic", "--threads", "1", "--max-batch", "2"]
    command = [sys.executable, "-m", "model.cli.main", *args]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().rpartition(" ")[2].strip()
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                stream = client.completions.create(
                    model="embedded", prompt="def", max_tokens=800, stream=True
                )
                next(iter(stream))
                process.send_signal(signal.SIGTERM)
                reasons = [piece.choices[0].finish_reason for piece in stream]
            assert reasons[-1] in ("stop", "length")
            assert process.wait() == 0 and process.stderr.read() == ""
        finally:
            process.kill()
