"""The suite of the Triton kernels, in the interpreter: what it leaves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.cases import linear
from bench.harness.timing import roofs
from bench.suites import bench_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

SUITE = Path(bench_gpu.__file__)
SHAPE = "linear:format=int8,tokens=2,inputs=256,outputs=32"


def run(*options: str) -> pytest.ExitCode | int:
    without = ("cacheprovider", "faulthandler", "unraisableexception", "xdist")
    quiet = ("-q", *(word for name in without for word in ("-p", f"no:{name}")))
    chosen = ("--benchmark-only", "--benchmark-max-time", "0.02", "-k", "gpu and linear")
    return pytest.main([str(SUITE), *quiet, *chosen, *options])


@pytest.fixture(autouse=True)
def quick_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)  # pytest-benchmark times nothing in a worker
    monkeypatch.setattr(linear, "sets_for", lambda nbytes, device: 1)
    monkeypatch.setattr(bench_gpu, "measure_roofs", lambda device: roofs.Roofs(0.1, 0.1, 0.1))


def test_a_kernel_is_timed_by_the_call(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    assert run("--device", "cpu", "--shape", SHAPE, f"--benchmark-json={out}") == 0
    (row,) = json.loads(out.read_text())["benchmarks"]
    info, seconds = row["extra_info"], row["stats"]["median"]
    nbytes = 32 * 256 + 32 * 8 * 2 + 2 * (256 + 32) * 2  # weights, their scales, rows in and out
    assert info["gbps"] == pytest.approx(nbytes / seconds / 1e9, abs=0.01)
    # The median of few rounds is a round here and a mean of two there.
    assert info["roof_share"] == pytest.approx(nbytes / 0.1e9 / seconds, rel=0.2, abs=1e-4)
    assert info["bound"] == "memory" and 0 < info["error"] < 0.01 and info["tokens"] == 2


def test_a_wrong_kernel_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    right = linear.linear
    monkeypatch.setattr(linear, "linear", lambda *x, **how: right(*x, **how) * 1.1)
    assert run("--device", "cpu", "--shape", SHAPE) == 1
    said = capfd.readouterr().out
    assert "it is wrong: relative error" in said


def test_a_shape_that_cannot_be_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for shape, cause in (
        ("linear:rows=4", "linear has no flag 'rows'"),
        ("gemm:x=1", "it begins with no op"),
    ):
        assert run("--shape", shape) == pytest.ExitCode.INTERRUPTED
        assert f"UsageError: --shape {shape}: {cause}" in capfd.readouterr().out
