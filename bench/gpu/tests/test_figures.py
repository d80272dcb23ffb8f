"""What a row says, beside formulas written out by hand: bytes, shares, words on the terminal."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as program
from bench.gpu import roofs, router, run, timer, tune
from bench.gpu.harness import Case, rates
from bench.gpu.report import line, params
from bench.gpu.roofs import Roofs
from bench.gpu.weights import activations_for

HERE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ROOFS = Roofs(read_gbps=4000.0, copy_gbps=4200.0, matmul_tflops=800.0)
V3, PLAIN = router.KINDS["v3"](4), router.KINDS["softmax"](2)


@pytest.mark.parametrize(
    ("case", "nbytes"),
    [
        # float32 logits; 2 slots of id, weight, slot, position; starts
        (lambda: router.route_case(1, 16, 64, PLAIN, False, False, HERE), 64 + 2 * 20 + 4 * 17),
        # a bias is read only where there is one
        (lambda: router.route_case(1, 32, 64, V3, True, False, HERE), 128 + 128 + 4 * 20 + 4 * 33),
        # a row read once, written for each slot
        (
            lambda: router.route_case(1, 16, 64, PLAIN, False, True, HERE),
            64 + 2 * 20 + 4 * 17 + 2 * 64 * 3,
        ),
        # a float32 gate and the token's row in; the row for each slot out; no logits
        (
            lambda: router.step_case(1, 64, 64, V3, HERE),
            4 * 64 * 64 + 2 * 64 + 4 * 64 + 4 * 20 + 4 * 65 + 2 * 4 * 64,
        ),
    ],
    ids=["route", "biased", "gather", "step"],
)
def test_a_router_moves_what_it_is_given_and_gives(case: Any, nbytes: int) -> None:
    assert case().nbytes == nbytes


def row(**changes: Any) -> dict[str, Any]:
    case = Case("around", "wait", {"tokens": 1}, lambda: None, nbytes=4_200_000, flops=8_000_000)
    head = {"op": case.op, "name": case.name, **case.params}
    return {**head, **rates(case, 2.0, ROOFS), "captured": True, **changes}


def test_a_row_has_the_share_of_each_roof() -> None:
    found = row()
    assert (found["read_share"], found["copy_share"], found["matmul_share"]) == (0.525, 0.5, 0.005)
    assert params(found) == {"tokens": 1}  # no figure is taken for a size


def test_a_line_for_the_terminal_has_no_markdown() -> None:
    found = line(row(x_flex=1.5, captured_flex=False, x_sdpa=2.0, captured_sdpa=True))
    assert found.endswith(", 1.50 x flex (NOT CAPTURED), 2.00 x sdpa")


def test_an_unexpected_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*given: Any) -> None:
        raise RuntimeError("CUDA error\n  no memory.\n")

    monkeypatch.setattr(program, "measured", measured)
    assert program.main(["--op", "moe", "--case"]) == program.EXIT_FAILED_CASES
    said = "error: unexpected RuntimeError: CUDA error no memory. --debug shows the traceback.\n"
    assert capsys.readouterr().err == said


def test_tuning_that_is_interrupted_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "main", interrupted)
    assert tune.run() == 130


def test_what_a_library_prints_in_the_new_process_is_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"op": "roofs"}, {"op": "moe", "name": "experts"}]
    said = ["[1/2] nvcc a.cu", "7", *map(json.dumps, rows)]
    fake = tmp_path / "bench/gpu/__main__.py"
    fake.parent.mkdir(parents=True)
    for package in (fake.parent, fake.parent.parent):  # else one on PYTHONPATH goes before it
        (package / "__init__.py").touch()
    fake.write_text(f"print({chr(10).join(said)!r})")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert list(run.in_a_new_process(("moe",), [], None)(1)) == rows[1:]
    assert capsys.readouterr().err == "[1/2] nvcc a.cu\n7\n"


def test_a_copy_is_counted_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a microsecond; on a CPU there is 1 MiB to read, and 512 KiB to copy."""
    ready = timer.Ready(lambda: 1e-6, calls=1, captured=False, rounds=3)
    fake = SimpleNamespace(prepare=lambda *_: ready)
    monkeypatch.setattr(roofs, "make_timer", lambda device: fake)
    found = roofs.measure_roofs.__wrapped__(torch.device("cpu"))
    assert (found.read_gbps, found.copy_gbps) == (1048.576, 1048.58)
    assert found.matmul_tflops == round(2 * 256**3 / 1e6, 3)


def test_a_slow_call_is_timed_in_five_rounds_and_a_quick_one_not_for_ever() -> None:
    assert [timer._rounds(once, 0.4) for once in (9.0, 0.02, 1e-8)] == [5, 20, 2000]


@pytest.mark.parametrize("code", [0, 1, 2, -9])
def test_a_new_process_has_the_minutes_that_are_left(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    commands: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return nullcontext(SimpleNamespace(stdout=iter(()), returncode=code))

    monkeypatch.setattr(run.subprocess, "Popen", popen)
    monkeypatch.setattr(run.time, "monotonic", lambda: 1000.0)
    rows = run.in_a_new_process(("moe",), [], 1090.0)(3)
    said = [] if code in (0, 1) else [f"it ended: {code}"]  # 1: cases failed, each with its row
    assert [found["why"] for found in rows] == said
    assert commands[0][-2:] == ["--minutes", "1.5"]


def test_many_rows_of_fp8_are_more_than_sixteen() -> None:
    assert [activations_for("fp8", rows, "auto") for rows in (16, 17)] == ["bf16", "fp8"]
