"""The order of a run's parts, what the sections need, and what is left of a run that ends early."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cpu import __main__ as command
from bench.cpu import run as run_module
from bench.cpu.cases import Settings, Tokens
from bench.cpu.machine import describe
from bench.cpu.quiet import Watch
from bench.cpu.run import Part, Run
from model.cli.common import EXIT_ERROR, EXIT_INTERRUPTED
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from pykernels.target import detect
from runtime.machine.topology import Topology
from runtime.workers.pool import configure_default_pool


@pytest.fixture(autouse=True)
def small_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    small = MoEShape(8, 256, 128, 2), ""
    monkeypatch.setattr(run_module, "layer_shape", lambda *given, most: small)
    monkeypatch.setattr(Watch, "_wait", lambda self: None)
    monkeypatch.setattr(Watch, "_share", lambda self, part: part() or 0.0)
    yield
    configure_default_pool()


def make(sections: tuple[str, ...], **options: Any) -> Run:
    settings = Settings.make(
        detect(), ("fp8", "bf16"), sections=sections, threads=1, quick=True, **options
    )
    return Run(settings, detect())


TABLE = [
    f"{fmt}: {what}"
    for fmt in ("fp8", "bf16")
    for what in ("weights, peers", "1 token", "64 tokens per expert")
]


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        (("table",), TABLE),
        (("skew",), ["scheduling under skew"]),
        (("latency",), ["fp8: weights", "fp8: latency", "bf16: weights", "bf16: latency"]),
        (("threads", "table"), [*TABLE, "fp8: weights", "fp8: threads", "bf16: weights",
                                "bf16: threads"]),
    ],
)  # fmt: skip
def test_only_the_chosen_sections_run_in_order(sections: tuple[str, ...], names: list[str]) -> None:
    assert [part.name for part in make(sections).parts] == names


def test_others_are_watched_for_while_peers_are_chosen() -> None:
    chosen = {p.name for p in make(("table", "threads")).parts if p.chooses}
    assert chosen == {"fp8: weights, peers", "bf16: weights, peers"}
    assert not any(part.chooses for part in make(("table",), peers=()).parts)


@pytest.mark.parametrize(
    ("tokens", "general"),
    [("1", ["torch bf16", "torch fp32", "numpy fp32"]), ("8", ["torch bf16", "torch fp32"]),
     ("64/expert", ["torch bf16"])],
)  # fmt: skip
def test_only_the_peers_of_a_format_and_its_calls_are_up(
    tokens: str, general: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(("table",), tokens=(Tokens.parse(tokens),))
    ended: list[list[str]] = []
    begun: list[str] = []
    monkeypatch.setattr(run_module, "RandomLayers", lambda *given: None)
    monkeypatch.setattr(run.peers, "retire", lambda keep: ended.append([p.name for p in keep]))
    monkeypatch.setattr(run.peers, "try_to_start", lambda peer: begun.append(peer.name))
    for part in run.parts:
        if not part.section:
            part.run()
    like = {"fp8": ["kt-kernel fp8"], "bf16": ["kt-kernel bf16", "llama.cpp bf16"]}
    assert ended == [like["fp8"] + general, like["bf16"] + general]
    assert begun == [*ended[0], *ended[1]]


@pytest.mark.parametrize("section", ["skew", "latency"])
def test_a_section_of_ours_alone_starts_no_peer(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    run = make((section,))
    monkeypatch.setattr(run.peers, "get", lambda *what: asked.append(what))
    run.measure(lambda *_: None, lambda: None)
    results = run.results()
    assert asked == []
    assert {name for name in ("table", "skew", "latency", "threads") if results[name]} == {section}
    assert results["missing"] == {"why": "", "parts": []}


def rows(*found: int) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [
        {"format": "fp8", "backend": "any", "per_expert": n, "tokens": n, "threads": 1, "ms": 1.0}
        for n in found
    ]


def raises(error: BaseException) -> Callable[[], list[dict[str, Any]]]:
    def part() -> list[dict[str, Any]]:
        raise error

    return part


def planned(parts: list[tuple[str, Callable[[], list[dict[str, Any]]]]], **options: Any) -> Run:
    """A run of made up parts of the latency section."""
    run = make(("latency",), peers=(), **options)
    run.parts = [Part(name, 1.0, "latency", part) for name, part in parts]
    run._left = [name for name, _ in parts]
    return run


def kept(out: Path) -> dict[str, Any]:
    (data,) = out.rglob("*.json")
    assert data.stem.endswith("-quick-latency-partial")
    assert "Missing, " in data.with_suffix(".md").read_text()
    found: dict[str, Any] = json.loads(data.read_text())
    return found


@pytest.mark.parametrize(
    ("error", "why", "code"),
    [
        (KeyboardInterrupt(), "interrupted", EXIT_INTERRUPTED),
        (PykernelsError("No room", "Free some"), "PykernelsError: No room", EXIT_ERROR),
        (ValueError("a\nbug"), "ValueError: a bug", None),  # the traceback is shown
    ],
    ids=lambda what: type(what).__name__,
)
def test_a_run_that_ends_early_keeps_its_rows(
    error: BaseException,
    why: str,
    code: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    run = planned([("fp8: a", rows(1, 2)), ("fp8: b", raises(error)), ("bf16: b", rows(3))])
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    ended: list[bool] = []
    monkeypatch.setattr(run.peers, "close", lambda: ended.append(True))
    if code is None:
        with pytest.raises(type(error)):
            command.main(["--out", str(tmp_path)])
    else:
        assert command.main(["--out", str(tmp_path)]) == code
    results = kept(tmp_path)
    assert [row["tokens"] for row in results["latency"]] == [1, 2]
    assert results["missing"]["parts"] == ["fp8: b", "bf16: b"]
    assert results["missing"]["why"].startswith(why)
    assert ended == [True]
    assert "-partial.json" in capfd.readouterr().err


def test_rows_are_in_a_file_before_the_next_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the process, where no exception tells of the end, costs one part only."""
    pytest.importorskip("matplotlib")
    seen: list[dict[str, Any]] = []

    def look() -> list[dict[str, Any]]:
        seen.append(kept(tmp_path))
        return rows(2)()

    run = planned([("fp8: a", rows(1)), ("fp8: b", look)])
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    assert command.main(["--out", str(tmp_path)]) == 0
    assert seen[0]["missing"] == {"why": "the run was killed", "parts": ["fp8: b"]}
    assert [row["tokens"] for row in seen[0]["latency"]] == [1]
    assert [path.stem.endswith("-latency") for path in tmp_path.rglob("*.md")] == [True]


def test_nothing_is_kept_of_a_run_that_measured_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    run = planned([("fp8: a", raises(KeyboardInterrupt()))])
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    assert command.main(["--out", str(tmp_path)]) == EXIT_INTERRUPTED
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (UnicodeEncodeError("ascii", "×", 0, 1, "ordinal not in range(128)"), "ordinal not in"),
    ],
)
def test_files_are_there_before_the_table_is_printed(
    error: Exception,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which may go to a full disk, a closed pipe, or a terminal of another encoding."""
    pytest.importorskip("matplotlib")
    run = planned([("fp8: a", rows(1))])
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    monkeypatch.setattr("bench.cpu.report.terminal", lambda results: raises(error)())
    assert command.main(["--out", str(tmp_path)]) == EXIT_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: the table cannot be printed ({why}")
    assert "but it is written. Read " in said and said.endswith("-quick-latency.md.")
    names = sorted(path.name.partition("-quick-latency")[2] for path in tmp_path.rglob("*.*"))
    assert names == ["-latency.png", ".json", ".md"]


def test_a_folder_that_cannot_be_written_later_on_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run = planned([("fp8: a", rows(1))])
    monkeypatch.setattr(command, "prepare", lambda chosen: run)
    (tmp_path / describe(run.target)["slug"]).touch()
    assert command.main(["--out", str(tmp_path)]) == EXIT_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: results cannot be written to {tmp_path}") and "File ex" in said


def test_a_flag_of_the_environment_that_cannot_be_is_told_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYKERNELS_KERNEL", "amx9")
    assert command.main(["--no-peers"]) == EXIT_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: PYKERNELS_KERNEL='amx9' cannot be used")


def test_the_flags_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topology, "usable", 4)
    with env.override(threads=3):
        options = ["--sections", "table", "--formats", "fp8,fp8", "--tokens", "1,1", "--no-peers"]
        settings = command.prepare(command.options(options)).settings
    assert (settings.threads, settings.formats, settings.tokens) == (3, ("fp8",), (Tokens(1),))


def test_options_are_checked_without_measuring(tmp_path: Path) -> None:
    """So that `make bench-cpu` need not install every peer to learn of a misspelt one."""
    pytest.importorskip("matplotlib")
    assert command.main(["--check", "--quick", "--no-peers", "--out", str(tmp_path)]) == 0
    assert command.main(["--check", "--formats", "fp9", "--out", str(tmp_path)]) == EXIT_ERROR
    assert list(tmp_path.iterdir()) == []


def test_no_part_begins_after_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    clock = [now]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: clock[0])

    def slow() -> list[dict[str, Any]]:
        clock[0] += 100.0
        return rows(1)()

    parts = [(f"fp8: {name}", slow) for name in "abcd"]
    run = planned(parts, minutes=2.5)
    run.measure(lambda *_: None, lambda: None)
    results = run.results()
    assert results["missing"] == {"why": "2.5 minutes were over", "parts": ["fp8: c", "fp8: d"]}
    assert len(results["latency"]) == 2
    assert results["machine"]["minutes"] == 3.3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--sections", "table,skews"],
            "there is no section 'skews'. Use table, skew, latency, threads, or some of them.",
        ),
        (["--formats", ""], "there is no weight format ''. Use one of bf16"),
        (["--tokens", ""], "'' is no number of tokens. Write 8, or 64/expert."),
        (["--peers", "vllm"], "there is no peer 'vllm'. Use kt-kernel, llama.cpp, torch, numpy"),
        (["--out", __file__], "results cannot be written to "),
        (["--out", "/proc/results"], "results cannot be written to /proc/results: "),
        (["--out", "a" * 300], "results cannot be written to aaa"),
        (["--tokens", "9" * 18, "--no-peers"], f"calls of {'9' * 18} tokens need "),
        (["--threads", "0"], "0 threads. Give --threads 1 to "),
        (["--threads", "-1"], "-1 threads. Give --threads 1 to "),
    ],
)
def test_what_cannot_be_is_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert command.main(options) == EXIT_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}") and line.endswith(".")
