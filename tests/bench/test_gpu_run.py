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
from bench.cases import gpu_run, processes
from bench.cases.gpu_run import GpuRun, check_flags, one_case
from bench.cases.processes import in_a_new_process
from bench.harness.timing import measure as measure_module
from bench.harness.timing import roofs as roofs_module
from bench.harness.timing.case import Case, built, rotating, sets_for
from bench.harness.timing.measure import measure, measure_all
from bench.harness.timing.roofs import Roofs, measure_roofs
from bench.harness.timing.rows import Row, params
from bench.harness.timing.timer import Ready
from pykernels.errors import PykernelsError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

CPU = torch.device("cpu")
ROOFS = Roofs(read_gbps=4000.0, copy_gbps=4200.0, matmul_tflops=800.0)


def wait(ms: float = 0.1) -> None:
    time.sleep(ms / 1e3)


def failing() -> None:
    raise ValueError("out of\nluck")


def case(run: Any, **changes: Any) -> Case:
    given = {"params": {"tokens": 1}, "nbytes": 8000, "flops": 10**9, **changes}
    return Case("moe", "wait", run=run, **given)


def gpu(ops: tuple[str, ...] = ("moe", "linear"), **options: Any) -> Iterator[Row]:
    for rows in GpuRun(ops, CPU, ROOFS, 1e-4, **options).rows():
        yield from rows


def test_a_row_is_flat_with_the_times_of_the_call_and_its_peers() -> None:
    peers = {"slow": partial(wait, 4), "broken": failing}
    found = measure(case(partial(wait, 2), peers=peers, compute="fp8"), CPU, 0.02, ROOFS)
    assert all(isinstance(value, int | float | str | bool) for value in found.values())
    assert json.loads(json.dumps(found)) == found
    assert 2000 <= found["us_p10"] <= found["us_median"] <= found["us_p90"] < 20_000
    assert found["x_slow"] > 1.3 and found["us_slow"] > found["us_median"]
    assert found["why_broken"] == "ValueError: out of luck" and "x_broken" not in found
    assert found["captured_slow"] is False and params(found) == {"tokens": 1}
    assert found["compute_roof_tflops"] == 1600.0
    called: list[int] = []
    found = measure(case(rotating(called.append, [(0,), (1,), (2,)]), sets=3), CPU, 1e-4, ROOFS)
    assert found["calls"] % 3 == 0 and called[:4] == [0, 1, 2, 0]
    assert [sets_for(n, CPU) for n in (1 << 30, 1 << 16, 1 << 15, 100)] == [1, 3, 6, 64]


def test_roofs_count_a_copy_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a microsecond; on a CPU there is 1 MiB to read, and 512 KiB to copy."""
    fake = SimpleNamespace(prepare=lambda *_: Ready(lambda: 1e-6, 1, False, 3))
    monkeypatch.setattr(roofs_module, "make_timer", lambda device: fake)
    found = measure_roofs.__wrapped__(CPU)
    assert (found.read_gbps, found.copy_gbps) == (1048.576, 1048.58)


def test_a_failing_case_is_a_row_and_the_others_go_on() -> None:
    def wide_case(T: int) -> Case:
        raise RuntimeError(f"no memory for {T}")

    def cases() -> Iterator[Case]:
        yield case(wait)
        yield case(failing)
        yield built("moe", wide_case, 9)
        raise RuntimeError("no memory for the next")

    good, bad, unmade, end = measure_all("moe", cases(), CPU, 0.002, ROOFS)
    assert "why" not in good
    assert bad["why"] == "ValueError: out of luck" and bad["tokens"] == 1
    assert (unmade["name"], unmade["why"]) == ("wide_case 9", "RuntimeError: no memory for 9")
    assert "no memory" in end["why"]


def test_a_lost_context_hands_what_is_left_to_a_new_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ops = SimpleNamespace(cases=lambda device, quick: iter([case(failing)] * 4))
    monkeypatch.setattr(gpu_run, "module_of", lambda op: ops)

    def lost(*given: Any) -> Any:
        raise PykernelsError("the GPU's context is lost", "Run the others in a new process")

    timer = SimpleNamespace(prepare=failing, check=lost)
    monkeypatch.setattr(measure_module, "make_timer", lambda device: timer)
    said = ["[1/2] nvcc a.cu", "7", '{"op": "roofs"}', '{"op": "moe", "name": "from there"}']
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").touch()  # else one on PYTHONPATH goes before it
    script = f"import sys\nprint({chr(10).join(said)!r})\nsys.exit(sys.argv[4] == '2' and 3)"
    (tmp_path / "bench/gpu.py").write_text(script)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    rows = list(gpu(skip=1, go_on=in_a_new_process(("moe", "linear"), [], None)))
    names = ["wait", "(a new process goes on)", "from there", "(the new process)"]
    assert [row["name"] for row in rows] == names  # one was skipped, one has run
    assert rows[-1]["why"] == "it ended: 3"


def ops_of_three(monkeypatch: pytest.MonkeyPatch, interrupted: str = "") -> list[str]:
    """Ops of one quick case and two others, quick to run; the result: who was called."""
    called: list[str] = []

    def call(name: str) -> None:
        if name == interrupted:
            raise KeyboardInterrupt
        called.append(name)
        wait()

    def cases(op: str, quick: bool) -> Iterator[Case]:
        for i in range(1 if quick else 3):
            peers = {"broken": failing, "peer": partial(called.append, f"peer {i}")}
            yield case(partial(call, f"{op} {i}"), params={"tokens": i}, peers=peers)

    def module_of(op: str) -> Any:
        return SimpleNamespace(
            cases=lambda device, quick: cases(op, quick), case=lambda device, tokens: case(wait)
        )

    collector = SimpleNamespace(collect=lambda: 0, freeze=lambda: 0, unfreeze=lambda: 0)
    monkeypatch.setattr(measure_module, "gc", collector)  # of all that pytest holds it is slow
    monkeypatch.setattr(gpu_run, "module_of", module_of)
    monkeypatch.setattr("bench.harness.machine.check_gpu", lambda name: CPU)
    monkeypatch.setattr("bench.harness.timing.roofs.measure_roofs", lambda device: ROOFS)
    return called


def test_few_cases_of_every_op_come_first_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ["moe 0", "linear 0", "moe 1", "moe 2", "linear 1", "linear 2"]
    called = ops_of_three(monkeypatch)
    assert [row["tokens"] for row in gpu(skip=3)] == [2, 1, 2]
    called.clear()
    assert len(list(gpu())) == 6
    assert [name for name in dict.fromkeys(called) if "peer" not in name] == whole
    assert not list(gpu(minutes=1.0, began=time.monotonic() - 61))


def test_a_run_writes_json_lines_and_files_interrupted_or_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    options = ["--op", "moe,linear", "--seconds", "1e-4", "--json", "--no-ahead"]
    options += ["--out", str(tmp_path)]
    ops_of_three(monkeypatch, interrupted="linear 1")
    assert program.main(options) == 130
    (data,) = tmp_path.rglob("*.json")
    assert data.stem.endswith("-moe-linear-partial")
    found = json.loads(data.read_text())
    assert len(found["rows"]) == 4 and found["why"] == "it was interrupted"
    assert (found["complete"], found["missing"]) == (False, ["linear: other cases"])
    ops_of_three(monkeypatch)
    capsys.readouterr()
    assert program.main([*options, "--quick"]) == 0
    roofs, first, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert roofs["op"] == "roofs" and first["us_median"] > 0
    names = sorted(path.suffix for path in tmp_path.rglob("*-quick-moe-linear.*"))
    assert names == [".json", ".md", ".png"]
    assert program.main(["--op", "moe", "--json", "--case", "tokens=1"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "wait"


def test_no_machine_needs_triton_for_the_command_line() -> None:
    code = "import sys; sys.modules['triton'] = None; import bench.gpu, bench.cpu"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, cause in (
        ([], "no CUDA GPU"),
        (["--minutes", "nan"], "nan minutes"),
        (["--op", "moe,linear", "--case", "tokens=1"], "not of moe,linear"),
    ):
        assert program.main(options) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("error: ") and said.endswith(".") and cause in said
    for op, flags, cause in (
        ("attention", {"head": 1}, "attention has no flag 'head'. Use kind, batch, context"),
        ("linear", {"tokens": "many"}, "tokens=many is no count"),
    ):
        with pytest.raises(PykernelsError, match=cause):
            one_case(op, flags, CPU, 0.1)  # type: ignore[arg-type]


def test_the_flags_of_the_command_line_are_the_cases() -> None:
    """Of ``pykernels bench attention|linear|router`` and of ``moe`` on a GPU."""
    from bench import cli

    words = ("kind", "format", "activations", "keys")
    for op in ("attention", "linear", "router"):
        names = inspect.signature(getattr(cli, op)).parameters
        own = ("device", "check", "against", "as_json", "debug")
        check_flags(op, {n: "x" if n in words else 1 for n in names if n not in own})
