"""An ablation: its stages in turns, its table; stages that differ in how a step is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.ablation import run as ablation_run
from bench.ablation.run import AblationRun, Settings
from bench.ablation.stages import InOrder, NodeByNode
from bench.e2e.ours import Ours, Shape
from bench.harness.session import measure_and_keep
from pykernels.errors import PykernelsError
from pykernels.target import detect
from runtime.devices.cpu.runner import CpuRunner
from runtime.engine import Engine, SamplingParams
from runtime.planning.config import ExecutionConfig

pytest.importorskip("matplotlib")


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "arch": "qwen3-30b",
        "fmt": "q8_0",
        "device": "cpu",
        "layers": 1,
        "experts": 8,
        "vocab": 256,
        "threads": 1,
        "kernel": "auto",
        "tokens": 2,
        "context": 8,
        "batches": (1,),
        "rounds": 2,
        "eager": False,
    }
    return Settings(**(values | changes))


class FakeEngines:
    """The second stage is twice as fast as the first, the third cannot be made."""

    made = 0

    def __init__(self, make: Any, cases: Any) -> None:
        FakeEngines.made += 1
        self.rate = 10.0 * FakeEngines.made
        if FakeEngines.made == 3:
            raise PykernelsError("no such thing", "Do without")

    def turn(self, cases: Any) -> Any:
        return dict.fromkeys(cases, self.rate)

    def close(self) -> None:
        pass


def test_each_stage_is_compared_with_the_one_before_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation_run, "Engines", FakeEngines)
    results = measure_and_keep(AblationRun(settings(), detect()), tmp_path, lambda row: None)
    first, second, third, fourth, _ = results["rows"]
    assert (first["x_before"], second["x_before"], fourth["x_before"]) == (1, 2, 2)
    assert (second["x_first"], fourth["x_first"]) == (2, 4)
    assert "no such thing" in third["why"]
    page = next(tmp_path.rglob("*-ablation.md")).read_text()
    assert "| + AMX or AVX kernels | **20.0**" in page and "Not timed: + one call a step" in page
    assert list(tmp_path.rglob("*-ablation-stages.png"))


@pytest.mark.all  # it compiles a model's kernels
def test_a_step_writes_the_same_however_it_is_called() -> None:
    ours = Ours.random(Shape("qwen3-30b", 2, 8, 256), "q8_0", ExecutionConfig(threads=2))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    try:
        for kind in (CpuRunner, InOrder, NodeByNode):
            runner = kind(ours.decoder, ours.pool, 64, 4, 32, 2)
            runner.load()
            with Engine(runner) as engine:
                results = engine.generate([[3, 1, 4, 1, 5], [9, 2]], params)
            texts.append([result.completions[0].token_ids for result in results])
    finally:
        ours.close()
    assert texts[0] == texts[1] == texts[2]


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(PykernelsError, match="no architecture"):
        settings(arch="gpt").check()
    with pytest.raises(PykernelsError, match="below 1"):
        settings(rounds=0).check()
