"""Cases, their figures, failing ones, the page and the command line; on a CPU's clock."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as program
from bench.gpu import around, attention, harness, linear, moe, router, run
from bench.gpu.ahead import PROCESSES, call_some
from bench.gpu.harness import Case, built, measure, measure_all, rates, rotating, sets_for
from bench.gpu.machine import describe, slug
from bench.gpu.report import line, markdown, params, title
from bench.gpu.roofs import Roofs, measure_roofs
from pykernels.errors import PykernelsError

CPU = torch.device("cpu")
HERE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
"""Where kernels run; times are those of a CPU's clock."""
ROOFS = Roofs(read_gbps=4000.0, copy_gbps=4200.0, matmul_tflops=800.0)


def wait(ms: float) -> None:
    time.sleep(ms / 1e3)


def failing() -> None:
    raise ValueError("out of\nluck")


def case(run: Any, **changes: Any) -> Case:
    given = {"params": {"tokens": 1}, "nbytes": 8000, "flops": 16, **changes}
    return Case("around", "wait", run=run, **given)


def row(**changes: Any) -> dict[str, Any]:
    return {**measure(case(lambda: wait(0.1)), CPU, 0.01, ROOFS), **changes}


def test_a_row_is_flat_and_its_times_are_the_call_s() -> None:
    peers = {"slow": lambda: wait(4), "broken": failing}
    found = measure(case(lambda: wait(2), peers=peers), CPU, 0.05, ROOFS)
    assert all(isinstance(value, int | float | str | bool) for value in found.values())
    assert json.loads(json.dumps(found)) == found
    assert 2000 <= found["us_p10"] <= found["us_median"] <= found["us_p90"] < 20_000
    assert found["x_slow"] > 1.3 and found["us_slow"] > found["us_median"]
    assert found["why_broken"] == "ValueError: out of luck" and "x_broken" not in found
    assert found["tokens"] == 1 and params(found) == {"tokens": 1}


FLOORS = [
    (4_000_000, 8_000_000, "bf16", "memory", 1.0, 0.5),
    (4_000_000, 1_600_000_000, "bf16", "compute", 2.0, 1.0),
    (4_000_000, 1_600_000_000, "fp8", "memory", 1.0, 0.5),  # a tie goes to memory
]


@pytest.mark.parametrize(("nbytes", "flops", "unit", "bound", "floor", "share"), FLOORS)
def test_rates_are_shares_of_the_larger_floor(
    nbytes: int, flops: int, unit: str, bound: str, floor: float, share: float
) -> None:
    found = rates(case(None, nbytes=nbytes, flops=flops, compute=unit), 2.0, ROOFS)
    assert (found["bound"], found["roof_us"], found["roof_share"]) == (bound, floor, share)
    assert found["gbps"] == 2000.0 and found["read_share"] == 0.5


def test_inputs_rotate_and_calls_are_whole_rotations() -> None:
    seen: list[int] = []
    call = rotating(seen.append, [(0,), (1,), (2,)])
    found = measure(case(call, sets=3), CPU, 0.002, ROOFS)
    assert found["calls"] % 3 == 0
    assert seen[:7] == [0, 1, 2, 0, 1, 2, 0]


def test_sets_are_as_many_as_exceed_the_l2() -> None:
    assert [sets_for(n, CPU) for n in (1 << 30, 1 << 16, 1 << 15, 100)] == [1, 3, 6, 64]


def test_a_failing_case_is_a_row_and_the_others_go_on() -> None:
    def cases() -> Iterator[Case]:
        yield case(lambda: wait(0.1))
        yield case(failing)
        yield case(lambda: wait(0.1))
        raise RuntimeError("no memory for the next")

    good, bad, again, end = measure_all("around", cases(), CPU, 0.002, ROOFS)
    assert "why" not in good and "why" not in again
    assert bad["why"] == "ValueError: out of luck" and bad["tokens"] == 1
    assert "no memory" in end["why"]


def test_a_case_that_cannot_be_made_is_a_row_too() -> None:
    def wide_case(T: int) -> Case:
        raise RuntimeError(f"no memory for {T}")

    (found,) = measure_all("around", [built("around", wide_case, 9)], CPU, 0.01, ROOFS)
    assert (found["name"], found["why"]) == ("wide_case 9", "RuntimeError: no memory for 9")


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
    monkeypatch.setattr(run, "module_of", lambda op: ops)
    monkeypatch.setattr(harness, "make_timer", lambda device: LostTimer())
    asked: list[int] = []

    def again(count: int) -> Iterator[dict[str, Any]]:
        asked.append(count)
        yield {"op": "moe", "name": "from there", "why": ""}

    rows = list(run.rows_of(("moe", "linear"), CPU, ROOFS, 0.01, False, 1, again))
    assert asked == [2]  # one was skipped, one has run
    assert [r["name"] for r in rows] == ["wait", "(a new process goes on)", "from there"]


def test_an_op_without_its_file_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(op: str) -> Any:
        raise ImportError("no module")

    monkeypatch.setattr(run, "module_of", missing)
    (found,) = run.rows_of(("moe",), CPU, ROOFS, 0.01, True)
    assert found["why"] == "ImportError: no module"


def test_roofs_are_measured() -> None:
    found = measure_roofs(HERE)
    assert min(found.read_gbps, found.copy_gbps, found.matmul_tflops) > 0


@pytest.fixture
def results() -> dict[str, Any]:
    rows = [
        row(us_torch=300.0, x_torch=2.5, captured_torch=True),
        row(us_eager=300.0, x_eager=1.5, captured_eager=False, why_flex="no such op"),
        {"op": "around", "name": "broken", "tokens": 3, "why": "ValueError: a|b"},
        row(op="router", name="route", flops=0),
    ]
    return {
        "machine": {**describe(CPU), "gpu": "NVIDIA X1", "slug": slug("NVIDIA X1")},
        "roofs": {"read_gbps": 4000.0, "copy_gbps": 4200.0, "matmul_tflops": 800.0},
        "quick": True,
        "rows": rows,
    }


def test_the_page_has_every_row(results: dict[str, Any]) -> None:
    results["machine"]["l2_bytes"] = 50 << 20
    page = markdown(results, "plot.png")
    assert "L2 50 MiB." in page
    assert page.startswith("# NVIDIA X1\n") and "Quick run" in page
    assert page.index("## around") < page.index("## router")
    assert "| wait tokens=1 |" in page and "| 2.50 |" in page and "| 1.50\\* |" in page
    assert "Not timed: broken tokens=3: ValueError: a|b" in page
    assert "No flex for wait tokens=1: no such op" in page
    assert page.endswith("![plot.png](plot.png)\n")
    results["rows"].insert(2, row(tokens=2, why_flex="no such op"))
    assert "No flex for 2 cases, the first wait tokens=1: no such op" in markdown(results, None)


def test_a_line_says_what_failed(results: dict[str, Any]) -> None:
    first, second, broken, _ = (line(found) for found in results["rows"])
    assert "2.50 x torch" in first and "memory roof" in first
    assert "no flex (no such op)" in second
    assert broken.endswith("broken tokens=3: FAILED: ValueError: a|b")


def test_files(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    day = results["machine"]["date"].split()[0]
    for op, stem in (("all", f"{day}-quick"), ("moe,linear", f"{day}-quick-moe-linear")):
        found = results | {"op": op}
        paths = program.write(found, tmp_path, program.stem(found))
        assert [path.name for path in paths] == [f"{stem}.{end}" for end in ("json", "md", "png")]
        assert json.loads(paths[0].read_text())["rows"][2]["why"] == "ValueError: a|b"
        assert paths[2].stat().st_size > 5000
        assert paths[0].parent.name == "nvidia-x1"


def test_the_program_writes_json_lines_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    two = [case(lambda: wait(0.1)), case(failing)]
    ops = SimpleNamespace(
        cases=lambda device, quick: iter(two), case=lambda device, tokens: case(lambda: wait(0.1))
    )
    monkeypatch.setattr(run, "module_of", lambda op: ops)
    monkeypatch.setattr("bench.gpu.machine.check_gpu", lambda name: CPU)
    options = ["--op", "moe", "--seconds", "0.01", "--json", "--no-ahead"]
    options += ["--out", str(tmp_path)]
    assert program.main(options) == program.EXIT_FAILED_CASES
    streams = capsys.readouterr()
    roofs, good, bad = map(json.loads, streams.out.splitlines())
    assert roofs["op"] == "roofs" and good["us_median"] > 0 and "luck" in bad["why"]
    assert "FAILED: ValueError: out of luck" in streams.err
    assert len(list(tmp_path.rglob("*.*"))) == 3
    assert program.main([*options, "--case", "tokens=1"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "wait"


def ops_of_three(monkeypatch: pytest.MonkeyPatch, interrupted: bool = False) -> list[str]:
    """Ops of one quick case and two others, quick to run; the result: who was called."""
    called: list[str] = []

    def call(name: str) -> None:
        if interrupted and name == "linear 1":
            raise KeyboardInterrupt
        called.append(name)
        wait(0.2)

    def cases(op: str, quick: bool) -> Iterator[Case]:
        for i in range(1 if quick else 3):
            yield case(partial(call, f"{op} {i}"), params={"tokens": i})

    monkeypatch.setattr(
        run, "module_of", lambda op: SimpleNamespace(cases=lambda device, quick: cases(op, quick))
    )
    monkeypatch.setattr("bench.gpu.machine.check_gpu", lambda name: CPU)
    monkeypatch.setattr("bench.gpu.roofs.measure_roofs", lambda device: ROOFS)
    return called


WHOLE = ["moe 0", "linear 0", "moe 1", "moe 2", "linear 1", "linear 2"]


def test_few_cases_of_every_op_come_first_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    called = ops_of_three(monkeypatch)
    rows = list(run.rows_of(("moe", "linear"), CPU, ROOFS, 0.001, False))
    assert list(dict.fromkeys(called)) == WHOLE
    assert [row["tokens"] for row in rows] == [0, 0, 1, 2, 1, 2]
    called.clear()
    assert len(list(run.rows_of(("moe", "linear"), CPU, ROOFS, 0.001, False, skip=3))) == 3
    assert list(dict.fromkeys(called)) == WHOLE[3:]


def test_no_case_begins_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_of_three(monkeypatch)
    past = time.monotonic() - 1
    assert not list(run.rows_of(("moe", "linear"), CPU, ROOFS, 0.001, False, until=past))


def test_an_interrupted_run_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ops_of_three(monkeypatch, interrupted=True)
    options = ["--op", "moe,linear", "--seconds", "0.001", "--no-ahead", "--out", str(tmp_path)]
    assert program.main(options) == program.EXIT_INTERRUPTED
    paths = {path.suffix: path for path in tmp_path.rglob("*.*")}
    assert set(paths) - {".png"} == {".json", ".md"}
    assert all(path.stem.endswith("-moe-linear-partial") for path in paths.values())
    assert len(json.loads(paths[".json"].read_text())["rows"]) == 4
    assert "Cases are missing: it was interrupted." in paths[".md"].read_text()


def test_every_case_is_called_by_one_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def cases(device: torch.device, quick: bool) -> Iterator[Case]:
        for i in range(5):
            peers = {"broken": failing, "peer": partial(called.append, f"peer {i}")}
            yield case(partial(called.append, f"case {i}"), peers=peers)

    monkeypatch.setattr(run, "module_of", lambda op: SimpleNamespace(cases=cases))
    monkeypatch.setattr("bench.gpu.machine.check_gpu", lambda name: CPU)
    done = [call_some("moe", share, 3, "cpu", False) for share in range(3)]
    assert done == [4, 4, 2]
    assert sorted(called) == [f"{kind} {i}" for kind in ("case", "peer") for i in range(5)]
    assert set(PROCESSES) == set(run.OPS)


def test_flags() -> None:
    assert program.flags(["tokens=12", "format=int4", "x=-3", "y=²"]) == {
        "tokens": 12, "format": "int4", "x": -3, "y": "²",
    }  # fmt: skip
    with pytest.raises(PykernelsError, match="NAME=VALUE"):
        program.flags(["tokens"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ([], "no CUDA GPU"),
        (["--op", "nonsense"], "no op 'nonsense'"),
        (["--device", "cpu"], "'cpu' is no CUDA device"),
        (["--minutes", "-1"], "-1 minutes"),
        (["--minutes", "nan"], "nan minutes"),
        (["--seconds", "0"], "0 seconds"),
        (["--case", "tokens=1"], "--case is of one op, not of all"),
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
        ("router", {"tokens": -1}, "tokens=-1 is no count"),
        ("linear", {"inputs": 0}, "inputs=0 is no count"),
        ("attention", {"window": 0, "batch": 0}, "batch=0 is no count"),
        ("attention", {"format": 8}, "format=8 is no name"),
        ("around", {"rows": 1}, "around has no flag 'rows'. Use what, tokens, hidden"),
    ],
)
def test_a_case_that_is_not_there_is_refused_by_name(op: str, flags: Any, cause: str) -> None:
    with pytest.raises(PykernelsError, match=cause):
        run.one_case(op, flags, CPU, 0.1)


def test_the_flags_of_the_command_line_are_the_cases() -> None:
    """Of ``pykernels bench attention|linear|router`` and of ``moe`` on a GPU."""
    from bench import cli

    own = {"device", "as_json", "debug"}
    for op in ("attention", "linear", "router"):
        named = set(inspect.signature(getattr(cli, op)).parameters) - own
        words = ("kind", "format", "activations", "keys")
        run.check_flags(op, {name: "x" if name in words else 1 for name in named})


SMALL = [
    lambda: router.route_case(1, 16, 64, router.KINDS["softmax"](2), False, True, HERE),
    lambda: router.route_case(9, 32, 64, router.KINDS["v3"](4), True, False, HERE),
    lambda: router.gate_case(2, 8, 64, torch.float32, HERE),
    lambda: router.router_case(9, 32, router.KINDS["v3"](4), HERE),
    lambda: router.sort_case(9, 32, router.KINDS["v3"](4), HERE),
    lambda: router.rows_case(9, 32, 16, router.KINDS["v3"](4), False, HERE),
    lambda: router.rows_case(9, 32, 16, router.KINDS["v3"](4), True, HERE),
    lambda: router.step_case(1, 64, 64, router.KINDS["v3"](4), HERE),
    lambda: router.case(HERE, 3, 32, 2, 16, "v2"),
    lambda: around.norm_case(2, 64, HERE),
    lambda: around.silu_case(2, 64, HERE),
    lambda: around.rope_case(2, 4, 1, 64, True, HERE),
    lambda: around.embed_case(2, 50, 64, HERE),
    lambda: around.sample_case(1, 300, "top-k, top-p", HERE),
    lambda: around.kv_write_case(2, 2, 64, HERE),
]


@pytest.mark.parametrize("make", SMALL)
def test_cases_and_their_peers_run(make: Any) -> None:
    made = make()
    made.run()
    for peer in made.peers.values():
        peer()
    assert made.nbytes > 0 and made.sets >= 1
    assert title({"op": made.op, "name": made.name, **made.params}).startswith(made.name)


def test_no_machine_needs_triton_for_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that a CPU uses import without it."""
    import subprocess

    code = "import sys; sys.modules['triton'] = None; import bench.gpu.__main__, model.cli.main"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
