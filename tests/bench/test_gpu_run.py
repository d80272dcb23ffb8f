"""Cases timed by a CPU's clock: peers, failing cases, a lost context, what a run leaves behind."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu as program
from bench.cases import attention, gpu_run, linear, moe, processes
from bench.cases.gpu_run import OPS, GpuRun, check_flags, one_case
from bench.cases.processes import PROCESSES, call_some, in_a_new_process
from bench.harness import measure as measure_module
from bench.harness import roofs as roofs_module
from bench.harness.case import Case, built, rotating, sets_for
from bench.harness.measure import measure, measure_all
from bench.harness.roofs import Roofs, measure_roofs
from bench.harness.rows import Row, params
from bench.harness.timer import Ready
from pykernels.errors import PykernelsError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

CPU = torch.device("cpu")
ROOFS = Roofs(read_gbps=4000.0, copy_gbps=4200.0, matmul_tflops=800.0)


def wait(ms: float) -> None:
    time.sleep(ms / 1e3)


def failing() -> None:
    raise ValueError("out of\nluck")


def case(run: Any, **changes: Any) -> Case:
    given = {"params": {"tokens": 1}, "nbytes": 8000, "flops": 16, **changes}
    return Case("moe", "wait", run=run, **given)


def gpu(ops: tuple[str, ...] = ("moe", "linear"), **options: Any) -> Iterator[Row]:
    for rows in GpuRun(ops, CPU, ROOFS, 0.001, **options).rows():
        yield from rows


def test_a_row_is_flat_with_the_times_of_the_call_and_its_peers() -> None:
    peers = {"slow": lambda: wait(4), "broken": failing}
    found = measure(case(lambda: wait(2), peers=peers), CPU, 0.05, ROOFS)
    assert all(isinstance(value, int | float | str | bool) for value in found.values())
    assert json.loads(json.dumps(found)) == found
    assert 2000 <= found["us_p10"] <= found["us_median"] <= found["us_p90"] < 20_000
    assert found["x_slow"] > 1.3 and found["us_slow"] > found["us_median"]
    assert found["why_broken"] == "ValueError: out of luck" and "x_broken" not in found
    assert found["captured_slow"] is False and params(found) == {"tokens": 1}
    fp8 = measure(case(lambda: wait(0.1), compute="fp8"), CPU, 0.01, ROOFS)
    assert fp8["compute_roof_tflops"] == 1600.0


def test_inputs_rotate_over_more_than_the_l2() -> None:
    seen: list[int] = []
    call = rotating(seen.append, [(0,), (1,), (2,)])
    found = measure(case(call, sets=3), CPU, 0.002, ROOFS)
    assert found["calls"] % 3 == 0 and seen[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert [sets_for(n, CPU) for n in (1 << 30, 1 << 16, 1 << 15, 100)] == [1, 3, 6, 64]


def test_roofs_count_a_copy_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a microsecond; on a CPU there is 1 MiB to read, and 512 KiB to copy."""
    assert measure_roofs(CPU).read_gbps > 0  # the kernel runs
    fake = SimpleNamespace(prepare=lambda *_: Ready(lambda: 1e-6, 1, False, 3))
    monkeypatch.setattr(roofs_module, "make_timer", lambda device: fake)
    found = roofs_module.measure_roofs.__wrapped__(CPU)
    assert (found.read_gbps, found.copy_gbps) == (1048.576, 1048.58)
    assert found.matmul_tflops == round(2 * 256**3 / 1e6, 3)


def test_a_failing_case_is_a_row_and_the_others_go_on() -> None:
    def wide_case(T: int) -> Case:
        raise RuntimeError(f"no memory for {T}")

    def cases() -> Iterator[Case]:
        yield case(lambda: wait(0.1))
        yield case(failing)
        yield built("moe", wide_case, 9)
        yield case(lambda: wait(0.1))
        raise RuntimeError("no memory for the next")

    good, bad, unmade, again, end = measure_all("moe", cases(), CPU, 0.002, ROOFS)
    assert "why" not in good and "why" not in again
    assert bad["why"] == "ValueError: out of luck" and bad["tokens"] == 1
    assert (unmade["name"], unmade["why"]) == ("wide_case 9", "RuntimeError: no memory for 9")
    assert "no memory" in end["why"]


@pytest.mark.parametrize(
    ("op", "make", "fewest"),
    [(attention, "build", 4), (linear, "case", 4), (moe, "random_experts", 3)],
)
def test_cases_behind_one_that_cannot_be_made_go_on(
    op: Any, make: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_case(*arguments: Any) -> Case:
        raise RuntimeError("no memory")

    monkeypatch.setattr(op, make, failing_case)
    rows = list(measure_all("", op.cases(CPU, True), CPU, 0.01, ROOFS))
    assert len(rows) >= fewest and all(row["why"] == "RuntimeError: no memory" for row in rows)


class LostTimer:
    """The clock of a GPU whose context a kernel has ended."""

    def prepare(self, call: Any, sets: int, seconds: float) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    def check(self) -> None:
        raise PykernelsError("the GPU's context is lost", "Run the others in a new process")


def test_a_lost_context_hands_what_is_left_to_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = SimpleNamespace(cases=lambda device, quick: iter([case(failing)] * 4))
    monkeypatch.setattr(gpu_run, "module_of", lambda op: ops)
    monkeypatch.setattr(measure_module, "make_timer", lambda device: LostTimer())
    asked: list[int] = []

    def go_on(count: int) -> Iterator[Row]:
        asked.append(count)
        yield {"op": "moe", "name": "from there", "why": ""}

    rows = list(gpu(skip=1, go_on=go_on))
    assert asked == [2]  # one was skipped, one has run
    assert [r["name"] for r in rows] == ["wait", "(a new process goes on)", "from there"]


def test_the_rows_of_a_new_process_are_told_from_other_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = ["[1/2] nvcc a.cu", "7", '{"op": "roofs"}', '{"op": "moe", "name": "experts"}']
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").touch()  # else one on PYTHONPATH goes before it
    script = f"import sys\nprint({chr(10).join(said)!r})\nsys.exit(len(sys.argv[1:]) == 7 and 3)"
    (tmp_path / "bench/gpu.py").write_text(script)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    assert list(in_a_new_process(("moe",), [], time.monotonic() + 60)(1)) == [json.loads(said[3])]
    assert capsys.readouterr().err == "[1/2] nvcc a.cu\n7\n"
    *_, last = in_a_new_process(("moe",), ["--quick"], None)(1)
    assert last["why"] == "it ended: 3"


def ops_of_three(monkeypatch: pytest.MonkeyPatch, interrupted: str = "") -> list[str]:
    """Ops of one quick case and two others, quick to run; the result: who was called."""
    called: list[str] = []

    def call(name: str) -> None:
        if name == interrupted:
            raise KeyboardInterrupt
        called.append(name)
        wait(0.2)

    def cases(op: str, quick: bool) -> Iterator[Case]:
        for i in range(1 if quick else 3):
            peers = {"broken": failing, "peer": partial(called.append, f"peer {i}")}
            yield case(partial(call, f"{op} {i}"), params={"tokens": i}, peers=peers)

    ops = {op: SimpleNamespace(cases=lambda device, quick, op=op: cases(op, quick)) for op in OPS}
    monkeypatch.setattr(gpu_run, "module_of", ops.__getitem__)
    monkeypatch.setattr(processes, "module_of", ops.__getitem__)
    monkeypatch.setattr(processes, "check_gpu", lambda name: CPU)
    monkeypatch.setattr("bench.harness.machine.check_gpu", lambda name: CPU)
    monkeypatch.setattr("bench.harness.roofs.measure_roofs", lambda device: ROOFS)
    return called


def test_few_cases_of_every_op_come_first_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ["moe 0", "linear 0", "moe 1", "moe 2", "linear 1", "linear 2"]
    called = ops_of_three(monkeypatch)
    for skip in (0, 3):
        called.clear()
        assert [row["tokens"] for row in gpu(skip=skip)] == [int(w[-1]) for w in whole[skip:]]
        assert [name for name in dict.fromkeys(called) if "peer" not in name] == whole[skip:]
    assert not list(gpu(minutes=1.0, began=time.monotonic() - 61))


def test_every_case_is_compiled_by_one_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    called = ops_of_three(monkeypatch)
    assert [call_some("moe", share, 2, "cpu", False) for share in range(2)] == [4, 2]
    assert sorted(called) == [f"{kind} {i}" for kind in ("moe", "peer") for i in range(3)]
    assert set(PROCESSES) == set(OPS)


def test_an_interrupted_run_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ops_of_three(monkeypatch, interrupted="linear 1")
    options = ["--op", "moe,linear", "--seconds", "0.001", "--no-ahead", "--out", str(tmp_path)]
    assert program.main(options) == 130
    (data,) = tmp_path.rglob("*.json")
    assert data.stem.endswith("-moe-linear-partial")
    found = json.loads(data.read_text())
    assert len(found["rows"]) == 4 and found["missing"] == "it was interrupted"


def test_the_program_writes_json_lines_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    ops_of_three(monkeypatch)
    two = [case(lambda: wait(0.1)), case(failing)]
    ops = SimpleNamespace(
        cases=lambda device, quick: iter(two), case=lambda device, tokens: case(lambda: wait(0.1))
    )
    monkeypatch.setattr(gpu_run, "module_of", lambda op: ops)
    options = ["--op", "moe", "--seconds", "0.01", "--json", "--no-ahead", "--out", str(tmp_path)]
    assert program.main(options) == program.EXIT_FAILED
    streams = capsys.readouterr()
    roofs, good, bad = map(json.loads, streams.out.splitlines())
    assert roofs["op"] == "roofs" and good["us_median"] > 0 and "luck" in bad["why"]
    assert "FAILED: ValueError: out of luck" in streams.err
    assert sorted(path.suffix for path in tmp_path.rglob("*.*")) == [".json", ".md", ".png"]
    assert program.main([*options, "--case", "tokens=1"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "wait"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ([], "no CUDA GPU"),
        (["--op", "nonsense"], "no op 'nonsense'"),
        (["--device", "cpu"], "'cpu' is no CUDA device"),
        (["--minutes", "nan"], "nan minutes"),
        (["--seconds", "0"], "0 seconds"),
        (["--op", "moe,linear", "--case", "tokens=1"], "not of moe,linear"),
        (["--out", __file__], "results cannot be written to"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_one_line(
    options: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(options) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and said.endswith(".") and cause in said


@pytest.mark.parametrize(
    ("op", "flags", "cause"),
    [
        ("moe", {"token": 1}, "moe has no flag 'token'. Use format, tokens, hidden"),
        ("attention", {"head": 1}, "attention has no flag 'head'. Use kind, batch, context"),
        ("linear", {"tokens": "many"}, "tokens=many is no count"),
        ("attention", {"window": 0, "batch": 0}, "batch=0 is no count"),
        ("attention", {"format": 8}, "format=8 is no name"),
    ],
)
def test_a_case_that_is_not_there_is_refused_by_name(op: str, flags: Any, cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause):
        one_case(op, flags, CPU, 0.1)


def test_the_flags_of_the_command_line_are_the_cases() -> None:
    """Of ``pykernels bench attention|linear|router`` and of ``moe`` on a GPU."""
    from model.cli import bench_gpu

    assert program.flags(["tokens=12", "format=int4"]) == {"tokens": 12, "format": "int4"}
    own = {"device", "as_json", "debug"}
    for op in ("attention", "linear", "router"):
        named = set(inspect.signature(getattr(bench_gpu, op)).parameters) - own
        words = ("kind", "format", "activations", "keys")
        check_flags(op, {name: "x" if name in words else 1 for name in named})


def test_no_machine_needs_triton_for_the_command_line() -> None:
    """The parts that a CPU uses import without it."""
    code = "import sys; sys.modules['triton'] = None; import bench.gpu, bench.cpu, model.cli.main"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
