"""A run on the CPU: its parts, what is left of one that ends early, skew, memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import cpu as command
from bench.cases import cpu_run, experts, skew
from bench.cases.cpu_run import CpuRun, RunPart
from bench.cases.ours import Ours, StaticOurs
from bench.cases.peers.table import PeerTable
from bench.harness.quiet import Watch
from bench.harness.settings import SECTIONS, Settings, Tokens
from bench.harness.timing.rows import Row, figures
from bench.harness.timing.turns import Times
from bench.peers import memory
from bench.peers.catalog import ENGINES, ROOT, Peer
from bench.peers.client import PeerMissing
from model.cli.shared.common import EXIT_ERROR, EXIT_INTERRUPTED
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import Target, detect
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


def make(sections: tuple[str, ...], formats: Any = ("fp8", "bf16"), **options: Any) -> CpuRun:
    settings = Settings.make(detect(), formats, sections=sections, threads=1, quick=True, **options)
    return CpuRun(replace(settings, rounds=1, turn=0.0), detect())


def rows(*tokens: int) -> Callable[[], list[Row]]:
    figure = figures(Times([[(0, 1e-3)]]), [1e6], 1e6, 10.0, None)
    head = {"op": "latency fp8", "name": "pykernels any", "format": "fp8"}
    return lambda: [{**head, "per_expert": n, "tokens": n, **figure} for n in tokens]


def planned(parts: dict[str, Callable[[], list[Row]]], **options: Any) -> CpuRun:
    """A run of made-up parts of the latency section."""
    run = make(("latency",), peers=(), **options)
    run.parts = [RunPart(name, 1.0, part) for name, part in parts.items()]
    run._left = list(parts)
    return run


def test_a_run_has_its_parts_in_order_up_to_its_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [part.name for part in make(("threads", "table")).parts]
    assert names[:3] == ["fp8: weights, peers", "fp8: 1 token", "fp8: 64 tokens per expert"]
    assert names[-2:] == ["bf16: weights", "bf16: threads"] and len(names) == 10
    now = [time.monotonic()]
    monkeypatch.setattr(cpu_run.time, "monotonic", lambda: now[0])

    def slow() -> list[Row]:
        now[0] += 100.0
        return rows(1, 2)()

    run = planned({f"fp8: {name}": slow for name in "abcd"}, minutes=2.5)
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    assert command.main(["--out", str(tmp_path)]) == 0
    paths = {path.name.partition("-quick-latency")[2]: path for path in tmp_path.rglob("*.*")}
    assert set(paths) == {"-latency.png", ".json", ".md"}  # and no partial ones
    results = json.loads(paths[".json"].read_text())
    assert len(results["rows"]) == 4 and results["why"] == "2.5 minutes were over"


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
        (data,) = tmp_path.rglob("*-quick-latency-partial.json")
        found: dict[str, Any] = json.loads(data.read_text())
        return found

    def look() -> list[Row]:  # a crash of the process here would cost one part only
        assert kept()["why"] == "the run was killed"
        raise error

    run = planned({"fp8: a": rows(1, 2), "fp8: b": look, "bf16: b": rows(3)})
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    ended: list[bool] = []
    monkeypatch.setattr(run.peers, "close", lambda: ended.append(True))
    assert command.main(["--out", str(tmp_path)]) == code
    results = kept()
    assert [row["tokens"] for row in results["rows"]] == [1, 2]
    assert results["why"].startswith(why) and ended == [True]
    assert (results["complete"], results["missing"]) == (False, ["fp8: b", "bf16: b"])
    assert "Not measured: fp8: b, bf16: b." in results["notes"]


def test_what_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["--check", "--no-peers", "--out", str(tmp_path)]
    for options, said in (
        (["--sections", "table,skews"], "there is no section 'skews'. Use table, skew"),
        (["--formats", "fp9"], "there is no weight format 'fp9'. Use one of bf16"),
        (["--tokens", "9" * 18], f"calls of {'9' * 18} tokens need "),
        (["--threads", "0"], "0 threads. Give --threads 1 to "),
        (["--out", "/proc/results"], "results cannot be written to /proc/results: "),
    ):
        assert command.main([*check, *options]) == EXIT_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {said}") and line.endswith(".")
    assert command.main([*check, "--quick"]) == 0 and list(tmp_path.iterdir()) == []


def test_a_disturbed_part_runs_again_and_the_quietest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter([0.5, 0.2, 0.3, 0.01, 0.5])
    monkeypatch.setattr(Watch, "_share", lambda self, part: part() or next(left))
    watch, runs = Watch(60.0), iter([{"run": n}] for n in range(1, 9))
    assert watch.run("noisy", lambda: next(runs)) == [{"run": 2}]  # of three
    assert watch.run("quiet", lambda: next(runs)) == [{"run": 4}]
    assert Watch(0.0).run("no time", lambda: next(runs)) == [{"run": 5}]
    assert watch.disturbed == [("noisy", 0.2)]


def fitted(gib: float, peers: tuple[str, ...] = ENGINES, **fewer: Any) -> tuple[int, str]:
    tokens = Tokens(1), Tokens(8), Tokens(64, True)
    options = {"formats": tuple(FORMATS), "tokens": tokens, "threads": 1, "peers": peers, **fewer}
    chosen = Settings.make(Target("cpu", "x86_64", frozenset(), 0, 0, 32 << 20), **options)

    def up(fmt: str, shape: MoEShape) -> list[Peer]:  # on a CPU with AVX-512
        return [peer for peer in chosen.together(fmt, shape) if not peer.unless]

    shape, why = memory.layer_shape(int(gib * 2**30), 32 << 20, chosen.formats, up)
    return shape.E, why


def test_the_experts_of_the_readme_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "roof_bytes", lambda: 512 << 20)  # this machine's may be larger
    readme = " ".join((ROOT / "bench/README.md").read_text().split())
    said = re.search(r"32 experts where ([\d.]+) GiB are free \(([\d.]+) without llama", readme)
    assert said
    rest = tuple(engine for engine in ENGINES if engine != "llama.cpp")
    for gib, peers in ((float(said[1]), ENGINES), (float(said[2]), rest)):
        assert fitted(gib, peers) == (32, "")
        assert fitted(gib - 0.5, peers)[0] == 16
    assert fitted(21)[1].startswith("16 experts: 32 in int8 beside kt-kernel, llama.cpp")
    assert fitted(21, ("kt-kernel", "torch")) == fitted(21, sections=("skew",)) == (32, "")
    with pytest.raises(PykernelsError, match=r"1\.0 GiB are free.*int8 beside kt.*fewer --peers"):
        fitted(1)


@pytest.mark.all  # it compiles the fastest kernels
def test_every_section_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a peer takes a second; one of them is not there."""

    def ready(table: PeerTable, peer: Any, T: int, threads: int | None = None) -> Any:
        if peer.mode == "fp32":
            raise PeerMissing("not installed")
        return SimpleNamespace(threads=2, turn=lambda *_: [(0, 1.0)])

    roofs = SimpleNamespace(read=9.0, sample=lambda: None, compute=lambda *_: ("dot", 0.5))
    for module in (experts, skew):
        monkeypatch.setattr(module, "Roofs", lambda *_: roofs)
    monkeypatch.setattr(PeerTable, "ready", ready)
    monkeypatch.setattr(PeerTable, "try_to_start", lambda *_: None)
    run = make(SECTIONS, formats=("bf16",), tokens=(Tokens(1),), peers=("kt-kernel", "torch"))
    found: dict[str, dict[str, list[Row]]] = {}
    for row in (row for some in run.rows() for row in some):
        found.setdefault(row["op"], {}).setdefault(row["name"], []).append(row)
    table, weights = found["experts bf16"], 2 * 3 * 256 * 128  # of two experts of a token
    auto = f"pykernels {resolve('auto', 'bf16', detect()).name}"
    ours = table[auto][0]
    assert ours["nbytes"] == 2 * weights and ours["flops"] == 2 * weights
    assert ours["why_torch fp32"] == "not installed"
    assert ours["x_torch bf16"] == pytest.approx(1e6 / ours["us_median"], rel=0.01)
    (theirs,) = table["torch bf16"]
    assert (theirs["nbytes"], theirs["us_median"], theirs["threads"]) == (2 * weights, 1e6, 2)
    assert [r["per_expert"] for r in found["latency bf16"][auto]] == [1, 2]
    assert "kt-kernel bf16" in found["threads bf16"] and len(found["threads bf16"]) == 2
    many, few = zip(*found["skew bf16"].values(), strict=True)
    busiest = {row["name"]: row["busiest"] for row in many}
    assert busiest["one static"] == 4 > busiest["zipf dynamic"] > busiest["balanced dynamic"] == 1
    assert many[0]["x_balanced"] == 1.0 and "x_static" in many[0]
    assert many[0]["nbytes"] == 4 * many[-1]["nbytes"]  # eight experts, and two
    assert many[0]["flops"] == many[-1]["flops"] > few[0]["flops"]


@pytest.mark.all  # it compiles a backend more
def test_static_shares_compute_the_same() -> None:
    T = 600  # so many that copying rows is a stage too
    shape = MoEShape(E=4, H=256, I=128, topk=2)
    ids = routings(shape, T, "zipf", count=1)
    with configure_default_pool(2):
        weights = RandomLayers(shape, "bf16", ids)
        ours, static = Ours(weights, "generic"), StaticOurs(weights, "generic")
        ours.prepare(T, ids)
        static.prepare(T, ids)
        want = ours.run(0, 0)
        static._workspace.buffers["h"].fill_(255)  # or it might find the rows of that call
        assert torch.equal(static.run(0, 0), want)
