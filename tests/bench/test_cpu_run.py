"""A run on the CPU: its parts, what is left of one that ends early, static shares, skew."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cpu as command
from bench.cases import cpu_run
from bench.cases.cpu_run import CpuRun, Part
from bench.cases.ours import Ours, StaticOurs
from bench.cases.skew import skew
from bench.harness.quiet import Watch, clock, others
from bench.harness.rows import Row, figures
from bench.harness.settings import Settings, Tokens
from bench.harness.turns import Times
from model.cli.common import EXIT_ERROR, EXIT_INTERRUPTED
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from pykernels.target import detect
from runtime.machine.topology import Topology
from runtime.profiling.workload import RandomLayers, routings
from runtime.workers.pool import configure_default_pool

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def small_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    small = MoEShape(8, 256, 128, 2), ""
    monkeypatch.setattr(cpu_run, "layer_shape", lambda *given, most: small)
    monkeypatch.setattr(Watch, "_wait", lambda self: None)
    monkeypatch.setattr(Watch, "_share", lambda self, part: part() or 0.0)
    yield
    configure_default_pool()


def make(sections: tuple[str, ...], **options: Any) -> CpuRun:
    settings = Settings.make(
        detect(), ("fp8", "bf16"), sections=sections, threads=1, quick=True, **options
    )
    return CpuRun(settings, detect())


def test_the_parts_of_the_chosen_sections_come_in_order() -> None:
    run = make(("threads", "table"))
    assert [part.name for part in run.parts] == [
        *(f"{fmt}: {what}" for fmt in ("fp8", "bf16")
          for what in ("weights, peers", "1 token", "64 tokens per expert")),
        *(f"{fmt}: {what}" for fmt in ("fp8", "bf16") for what in ("weights", "threads")),
    ]  # fmt: skip
    chosen = {part.name for part in run.parts if part.chooses}
    assert chosen == {"fp8: weights, peers", "bf16: weights, peers"}
    assert [part.name for part in make(("skew",)).parts] == ["scheduling under skew"]


def test_only_the_peers_of_a_format_and_its_calls_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(("table",), tokens=(Tokens(8),))
    kept: list[list[str]] = []
    begun: list[str] = []
    monkeypatch.setattr(cpu_run, "RandomLayers", lambda *given: None)
    monkeypatch.setattr(run.peers, "retire", lambda keep: kept.append([p.name for p in keep]))
    monkeypatch.setattr(run.peers, "try_to_start", lambda peer: begun.append(peer.name))
    for part in run.parts:
        if part.prepares:
            part.run()
    general = ["torch bf16", "torch fp32"]
    assert kept == [["kt-kernel fp8", *general], ["kt-kernel bf16", "llama.cpp bf16", *general]]
    assert begun == [*kept[0], *kept[1]]


def rows(*tokens: int) -> Callable[[], list[Row]]:
    figure = figures(Times([[(0, 1e-3)]]), [1e6], 1e6, 10.0, None)
    head = {"op": "latency fp8", "name": "pykernels any", "format": "fp8"}
    return lambda: [{**head, "per_expert": n, "tokens": n, **figure} for n in tokens]


def raises(error: BaseException) -> Callable[[], list[Row]]:
    def part() -> list[Row]:
        raise error

    return part


def planned(parts: dict[str, Callable[[], list[Row]]], **options: Any) -> CpuRun:
    """A run of made-up parts of the latency section."""
    run = make(("latency",), peers=(), **options)
    run.parts = [Part(name, 1.0, part) for name, part in parts.items()]
    run._left = list(parts)
    return run


@pytest.mark.parametrize(
    ("error", "why", "code"),
    [
        (KeyboardInterrupt(), "it was interrupted", EXIT_INTERRUPTED),
        (PykernelsError("No room", "Free some"), "No room", EXIT_ERROR),
        (ValueError("a\nbug"), "ValueError: a bug", 1),
    ],
    ids=lambda what: type(what).__name__,
)
def test_a_run_that_ends_early_keeps_its_rows(
    error: BaseException, why: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> dict[str, Any]:
        (data,) = tmp_path.rglob("*.json")
        assert data.stem.endswith("-quick-latency-partial")
        found: dict[str, Any] = json.loads(data.read_text())
        return found

    def look() -> list[Row]:  # a crash of the process here would cost one part only
        assert kept()["missing"] == "the run was killed"
        raise error

    run = planned({"fp8: a": rows(1, 2), "fp8: b": look, "bf16: b": rows(3)})
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    ended: list[bool] = []
    monkeypatch.setattr(run.peers, "close", lambda: ended.append(True))
    assert command.main(["--out", str(tmp_path)]) == code
    results = kept()
    assert [row["tokens"] for row in results["rows"]] == [1, 2]
    assert results["missing"].startswith(why)
    assert "Not measured: fp8: b, bf16: b." in results["notes"]
    assert ended == [True]


def test_a_whole_run_leaves_its_files_and_no_partial_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "prepare", lambda chosen: planned({"fp8: a": rows(1, 2)}))
    for _ in range(2):  # the second takes nobody's place
        assert command.main(["--out", str(tmp_path)]) == 0
    names = sorted(path.name.partition("-quick-latency")[2] for path in tmp_path.rglob("*.*"))
    assert names == ["-2-latency.png", "-2.json", "-2.md", "-latency.png", ".json", ".md"]


def test_nothing_is_kept_of_a_run_that_measured_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned({"fp8: a": raises(KeyboardInterrupt())})
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    assert command.main(["--out", str(tmp_path)]) == EXIT_INTERRUPTED
    assert list(tmp_path.rglob("*")) == []


def test_no_part_begins_after_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(cpu_run.time, "monotonic", lambda: now[0])

    def slow() -> list[Row]:
        now[0] += 100.0
        return rows(1)()

    run = planned({f"fp8: {name}": slow for name in "abcd"}, minutes=2.5)
    assert len(list(run.rows())) == 2
    assert run.head()["missing"] == "2.5 minutes were over"
    assert "Not measured: fp8: c, fp8: d." in run.head()["notes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sections", "table,skews"], "there is no section 'skews'. Use table, skew"),
        (["--formats", ""], "there is no weight format ''. Use one of bf16"),
        (["--peers", "vllm"], "there is no peer 'vllm'. Use kt-kernel, llama.cpp, torch, numpy"),
        (["--out", __file__], "results cannot be written to "),
        (["--out", "/proc/results"], "results cannot be written to /proc/results: "),
        (["--tokens", "9" * 18, "--no-peers"], f"calls of {'9' * 18} tokens need "),
        (["--threads", "0"], "0 threads. Give --threads 1 to "),
    ],
)
def test_what_cannot_be_is_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--check", "--out", str(tmp_path), *options]) == EXIT_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}") and line.endswith(".")


def test_options_and_flags_of_the_environment_make_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Topology, "usable", 4)
    with env.override(threads=3):
        options = ["--sections", "table", "--formats", "fp8,fp8", "--tokens", "1,1", "--no-peers"]
        settings = command.prepare(command.options(options)).settings
    assert (settings.threads, settings.formats, settings.tokens) == (3, ("fp8",), (Tokens(1),))
    assert command.main(["--check", "--quick", "--no-peers", "--out", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []  # `make bench-cpu` asks first: nothing is measured


@pytest.mark.parametrize("T", [1, 40, pytest.param(600, id="600: rows are a stage")])
def test_static_shares_compute_the_same(T: int) -> None:
    shape = MoEShape(E=4, H=256, I=128, topk=2)
    ids = routings(shape, T, "zipf", count=1)
    with configure_default_pool(Topology.detect().usable):
        weights = RandomLayers(shape, "fp8", ids)
        ours, static = Ours(weights, "auto"), StaticOurs(weights, "auto")
        ours.prepare(T, ids)
        static.prepare(T, ids)
        want = ours.run(0, 0)
        static._pool.workspace.buffers["x"].fill_(255)  # or it might find the rows of that call
        assert torch.equal(static.run(0, 0), want)


def test_skew_compares_with_balanced_and_with_static_shares() -> None:
    settings = Settings.make(detect(), formats=("bf16",), threads=1, quick=True)
    shape = MoEShape(E=8, H=64, I=32, topk=8)
    with configure_default_pool(1) as pool:
        found = skew("bf16", "generic", shape, pool, settings, detect())
    kinds = ("balanced", "zipf", "one")
    assert [(r["tokens"], r["routing"], r["schedule"]) for r in found] == [
        (T, kind, how) for T in (256, 8) for kind in kinds for how in ("dynamic", "static")
    ]
    many = {r["routing"]: r for r in found if r["tokens"] == 256 and r["schedule"] == "dynamic"}
    assert many["balanced"]["x_balanced"] == 1.0 and "x_static" in many["one"]
    assert (many["balanced"]["busiest"], many["one"]["busiest"]) == (1.0, 4.0)
    assert 1.0 < many["zipf"]["busiest"] < 4.0
    assert many["balanced"]["nbytes"] == 4 * many["one"]["nbytes"]  # eight experts, and two
    assert many["balanced"]["flops"] == many["one"]["flops"]


def test_a_disturbed_part_runs_again_and_the_quietest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter([0.5, 0.2, 0.3, 0.01, 0.5, 0.5])
    monkeypatch.setattr(Watch, "_share", lambda self, part: part() or next(left))
    watch, runs = Watch(60.0), iter([{"run": n}] for n in range(1, 9))
    assert watch.run("noisy", lambda: next(runs)) == [{"run": 2}]  # of three
    assert watch.run("quiet", lambda: next(runs)) == [{"run": 4}]
    assert watch.run("prepares", lambda: next(runs), tries=1) == [{"run": 5}]
    assert Watch(0.0).run("no time", lambda: next(runs)) == [{"run": 6}]
    assert watch.disturbed == [("noisy", 0.2), ("prepares", 0.5)]


def test_others_are_what_is_neither_idle_nor_ours() -> None:
    assert others((10.0, 1.0), (14.0, 4.0), cores=2, wall=2.0) == 0.25
    assert others((10.0, 1.0), (11.0, 2.5), cores=2, wall=2.0) == 0.0  # clocks are coarse
    before = clock()
    sum(i * i for i in range(2_000_000))
    assert clock()[1] > before[1]
