"""`pykernels calibrate` and what `doctor` says of it; backend and timings are made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from model.cli.main import app
from model.doctor import examine
from pykernels.env import env
from pykernels.quant import FORMATS
from pykernels.target import detect
from runtime.machine import tuning
from runtime.machine.tuning import Choices
from runtime.profiling import calibrate as measuring
from runtime.profiling.calibrate import Calibration, Point

POOL = SimpleNamespace(threads=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with env.override(cache_dir=tmp_path):
        yield tmp_path


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format gets the AMX backend; bf16's GEMM pays from 8 tokens, the others' never. One
    thread is the usual number."""
    monkeypatch.setattr("runtime.machine.topology.Topology.default_threads", lambda *_: 1)
    monkeypatch.setattr("pykernels.registry.resolve", lambda *_: SimpleNamespace(name="amx"))

    def calibrate(fmt, pool, backend, activations, timer=None, progress=None) -> Calibration:
        assert backend == "amx"
        progress(0.5)
        points = (Point(4, 1e-3, 2e-3, 0.5), Point(8, 3e-3, 2e-3, 1.5))
        return Calibration(
            backend, fmt, activations, pool.threads, 8 if fmt == "bf16" else 129, points, 0.0
        )

    monkeypatch.setattr(measuring, "calibrate", calibrate)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["calibrate", *arguments], prog_name="pykernels")
    streams = capsys.readouterr()
    return int(ended.value.code or 0), streams.out, streams.err


def test_a_table_a_decision_and_a_file(amx: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--format", "bf16", "--format", "fp8", "--threads", "1")
    assert (code, err) == (0, "")
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "bf16, bf16 activations, 1 threads" in lines
    assert "4 1.000 2.000 0.50 tiles" in lines
    assert "8 3.000 2.000 1.50 GEMM" in lines
    assert any(line.startswith("bf16: GEMM from 8 tokens an expert. Of all") for line in lines)
    assert any(line.startswith("fp8: no GEMM below 129 tokens an expert. Of all") for line in lines)
    assert lines[-1] == f"Kept in {tuning.path(detect().cpu)}"
    assert tuning.read(detect().cpu) == {
        tuning.key("amx", "bf16"): Choices(8),
        tuning.key("amx", "fp8"): Choices(129),
    }


def test_a_format_named_twice_is_measured_once(
    amx: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "--format", "bf16", "--format", "bf16")
    assert out.count("GEMM from 8 tokens") == 1


@pytest.mark.parametrize(("options", "noted"), [(["--threads", "1"], True), ([], False)])
def test_another_number_of_threads_than_the_usual_is_noted(
    amx: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    noted: bool,
) -> None:
    monkeypatch.setattr("runtime.workers.pool.WorkerPool", lambda *_: nullcontext(POOL))
    monkeypatch.setattr("runtime.machine.topology.Topology.default_threads", lambda *_: 2)
    _, _, err = run(capsys, "--format", "bf16", *options)
    assert (
        "note: measured with --threads 1, where 2 would be usual, but kept for any number" in err
    ) == noted


def test_json_is_one_object(amx: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--format", "bf16", "--json")
    found = json.loads(out)
    assert (code, found["cpu"], found["no_gemm"]) == (0, detect().cpu, {})
    assert found["formats"]["bf16"]["gemm_from"] == 8
    assert Path(found["file"]).exists()


def test_every_format_is_calibrated_unless_told(
    amx: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "--json")[0] == 0
    assert set(tuning.read(detect().cpu)) == {tuning.key("amx", fmt) for fmt in FORMATS}


def test_int8_activations_have_choices_of_their_own(
    amx: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "--activations", "int8")[0] == 0
    able = {tuning.key("amx", name, "int8") for name, fmt in FORMATS.items() if fmt.int8_kind}
    assert set(tuning.read(detect().cpu)) == able != set()


def test_without_a_gemm_there_is_nothing_to_do(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    with env.override(kernel="generic"):
        code, out, err = run(capsys)
    text = "Nothing to calibrate for every format: kernel generic has no GEMM\n"
    assert (code, out, err) == (0, text, "")
    assert list(cache.iterdir()) == []


def test_a_file_that_cannot_be_read_is_told_first(
    amx: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.path(detect().cpu).write_text("{")
    code, out, err = run(capsys, "--format", "bf16")
    assert (code, out) == (2, "")
    assert "cannot be read" in err and "Delete it" in err


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_timed(
    amx: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "calibrate", None)
    with env.override(cache_dir=Path(__file__) / "below a file"):
        code, out, err = run(capsys, "--format", "bf16")
    assert (code, out) == (2, "")
    assert "cannot be written" in err and "PYKERNELS_CACHE_DIR" in err


def test_an_unknown_format_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--format", "fp9")
    assert (code, out) == (2, "")
    assert "no weight format 'fp9'" in err


def test_doctor_says_what_is_calibrated(amx: None) -> None:
    tuning.write(detect().cpu, tuning.key("amx", "bf16"), Choices(9), {})
    facts = {fact.name: fact.value for fact in examine.look_at_calibration()}
    assert set(facts) == set(FORMATS)
    assert facts["bf16"] == "GEMM from 9 tokens an expert (calibrated)"
    assert facts["fp8"].endswith("(default; `pykernels calibrate` measures it)")


def test_doctor_without_a_gemm_says_so() -> None:
    with env.override(kernel="generic"):
        (fact,) = examine.look_at_calibration()
    assert fact.value == "nothing to choose: no kernel in use here has a GEMM"
