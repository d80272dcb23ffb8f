"""`pykernels calibrate` and what `doctor` says of it; backend and timings are made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from model.doctor import examine
from pykernels.env import env
from pykernels.quant import FORMATS
from pykernels.registry import get_backend
from pykernels.target import detect
from runtime.machine import tuning
from runtime.profiling import calibrate as measuring
from runtime.profiling.calibrate import Calibration, Point

from ..conftest import Run, failed

CPU = detect().cpu


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with env.override(cache_dir=tmp_path):
        yield tmp_path


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format gets the AMX backend; bf16's GEMM pays from 8 tokens, the others' never. One
    thread is the usual number."""
    pool = SimpleNamespace(threads=1)
    monkeypatch.setattr("runtime.workers.pool.WorkerPool", lambda *_: nullcontext(pool))
    monkeypatch.setattr("runtime.machine.topology.Topology.default_threads", lambda *_: 1)
    monkeypatch.setattr("pykernels.registry.resolve", lambda *_: get_backend("amx"))

    def calibrate(fmt, pool, backend, activations, timer=None, progress=None) -> Calibration:
        assert backend == "amx"
        progress(0.5)
        points = (Point(4, 1e-3, 2e-3, 0.5), Point(8, 3e-3, 2e-3, 1.5))
        return Calibration(
            backend, fmt, activations, pool.threads, 8 if fmt == "bf16" else 129, points, 0.0
        )

    monkeypatch.setattr(measuring, "calibrate", calibrate)


def test_a_decision_and_a_file(amx: None, run: Run) -> None:
    formats = ("--format", "bf16", "--format", "fp8", "--format", "bf16")  # each measured once
    result = run("calibrate", *formats, "--threads", 1)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("bf16: GEMM from 8 tokens") == 1
    assert tuning.read("amx") == {"bf16": 8, "fp8": 129}


def test_int8_activations_have_choices_of_their_own(amx: None, run: Run) -> None:
    result = run("calibrate", "--activations", "int8", "--json")
    found = json.loads(result.out)
    assert (result.code, found["cpu"], found["no_gemm"]) == (0, CPU, {})
    assert found["formats"]["int8"]["gemm_from"] == 129 and Path(found["file"]).exists()
    able = {name for name, fmt in FORMATS.items() if fmt.int8_kind}
    assert set(tuning.read("amx", "int8")) == able != set()


def test_without_a_gemm_there_is_nothing_to_do(run: Run, cache: Path) -> None:
    with env.override(kernel="generic"):
        result = run("calibrate")
        (fact,) = examine.look_at_calibration()
    text = "Nothing to calibrate for every format: kernel generic has no GEMM\n"
    assert (result.code, result.out, result.err) == (0, text, "")
    assert list(cache.iterdir()) == []
    assert fact.value == "nothing to choose: no kernel in use here has a GEMM"


def test_bad_files_are_found_before_anything_is_timed(
    amx: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "calibrate", None)
    failed(run("calibrate", "--format", "fp9"), "no weight format 'fp9'")
    tuning.path("amx").write_text("{")
    failed(run("calibrate", "--format", "bf16"), "cannot be read.*Delete it")
    with env.override(cache_dir=Path(__file__) / "below a file"):
        failed(run("calibrate", "--format", "bf16"), "cannot be written.*PYKERNELS_CACHE_DIR")


def test_doctor_says_what_is_calibrated(amx: None) -> None:
    tuning.write("amx", {"bf16": 9})
    facts = {fact.name: fact.value for fact in examine.look_at_calibration()}
    assert set(facts) == set(FORMATS)
    assert facts["bf16"] == "GEMM from 9 tokens an expert (calibrated)"
    assert facts["fp8"].endswith("(default; `pykernels calibrate` measures it)")
