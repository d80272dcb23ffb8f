"""What a loaded model is predicted to do, and the line where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import model
from model.cli.app import app
from model.planner.forecast import Forecast
from model.planner.machines import find_machine
from runtime.devices.sim.machine import Machine
from runtime.engine.pace import DecodePace, Speed
from runtime.planning.execution import ExecutionPlan
from runtime.planning.lowerable import Lowerable

from .test_plan import planned

HERE = "h200-16-cores"


def slow() -> Machine:
    """A machine that reads a megabyte a second."""
    machine = find_machine(HERE)
    return replace(machine, cpu=replace(machine.cpu, read_gbps=1e-3, contended_gbps=None))


def test_it_is_the_plan_s() -> None:
    words = ["--machine", HERE, "--device", "cpu", "--context", "64", "--batch", "2"]
    plan = planned(str(model.EMBEDDED), *words)
    with model.load_engine(model.EMBEDDED, max_num_seqs=2) as llm:
        forecast = Forecast(llm.runner.model, llm.runner.plan, find_machine(HERE))
        assert forecast.tok_s(2, 64) == pytest.approx(plan["decode_tok_s"], rel=1e-3)
        assert llm.forecast is None or llm.runner.weight_bytes > 0  # it fits into large caches


@pytest.mark.parametrize(
    ("measured", "is_off"), [(85, False), (118, False), (80, True), (125, True)]
)
def test_a_fifth(measured: float, is_off: bool) -> None:
    assert Speed(1, 512, 100.0, measured).is_off == is_off


def test_generate_says_once_that_a_model_is_not_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def forecast_of(lowerable: Lowerable, plan: ExecutionPlan, pool: object) -> Forecast:
        return Forecast(lowerable, plan, slow())

    monkeypatch.setattr("model.planner.forecast.forecast_of", forecast_of)
    words = ["generate", "--max-new-tokens", "110", "--temperature", "0", "--draft", "off", "x ="]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("are predicted (one sequence") == 1
    assert "decode is predicted at 0." in result.stderr


def test_a_speed_is_measured_over_all_sequences() -> None:
    with model.load_engine(model.EMBEDDED, max_num_seqs=4) as llm:
        forecast = Forecast(llm.runner.model, llm.runner.plan, slow())
        speed = forecast.speed(DecodePace(4, 100, 0.01))
    assert speed.measured == pytest.approx(400)
    assert speed.predicted == pytest.approx(forecast.tok_s(4, 100)) and speed.is_off
