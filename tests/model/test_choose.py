"""What runs where nobody says: `pykernels plan` and ``load_engine`` choose alike, and steadily."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import model
from model.checkpoint.config import read_config
from model.inspection.subject import open_subject
from model.load import chosen_for
from model.opened import open_weights
from model.planner.choose import chosen_by_plan
from model.planner.forecast import Forecast
from model.planner.machine_file import parse_machine, read_machine
from model.planner.machines import find_machine, shipped
from model.planner.settings import Case, Wanted
from runtime.devices.sim.machine import Machine
from runtime.engine import EngineConfig
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import ExecutionPlan
from runtime.planning.lowerable import Lowerable

from ..engine.test_simulated import MACHINE
from . import tiny
from .test_plan import planned

OPEN = ExecutionConfig(device="auto")
ENGINE = EngineConfig()


def of_bytes(gpu_gbps: float) -> Machine:
    """A machine on which nothing but reading weights takes time, on the CPU at 1 GB/s."""
    machine = parse_machine(MACHINE, Path("machine.yaml"))
    assert machine.gpu is not None
    part = {"read_gbps": gpu_gbps, "experts_share": 0.5, "linear_share": 0.5, "link_gbps": 1e9}
    return replace(machine, gpu=replace(machine.gpu, **part))  # type: ignore[arg-type]


def chosen(arch: str, fmt: str, machine: Machine, run: ExecutionConfig = OPEN) -> ExecutionConfig:
    subject = open_subject(arch, fmt)
    wanted = replace(Wanted().within(subject.positions), engine=ENGINE)
    return chosen_by_plan(Case(subject, machine, run, wanted)).execution


@pytest.mark.parametrize("name", sorted(shipped()))
def test_loading_chooses_what_the_plan_says(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    config = read_config(tmp_path)
    with open_weights(tmp_path, config, device="auto") as weights:
        found, _ = chosen_for(OPEN, ENGINE, weights, config, find_machine(name))
    plan = planned(str(tmp_path), "--machine", name)
    assert plan["device"] == found.device
    assert ("--expert-cache" in str(plan["serve"])) == bool(found.slots)


@pytest.mark.parametrize(
    ("gpu_gbps", "device"),
    [(1.0, "cpu"), (1.05, "cpu"), (1.2, "cuda:0"), (0.2, "cpu")],
)
def test_a_gpu_must_be_a_tenth_faster(tmp_path: Path, gpu_gbps: float, device: str) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    assert chosen(str(tmp_path), "bf16", of_bytes(gpu_gbps)).device == device


@pytest.mark.parametrize(
    ("machine", "run", "device"),
    [
        ("h200-16-cores", OPEN, "cuda:0"),
        ("h200-16-cores", ExecutionConfig(device="cpu"), "cpu"),
        ("xeon-amx-2-cores", OPEN, "cpu"),
    ],
)
def test_what_is_given_stays(machine: str, run: ExecutionConfig, device: str) -> None:
    assert chosen("qwen3-30b", "q4_k", find_machine(machine), run).device == device


def test_settings_for_a_gpu_choose_one(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    run = replace(OPEN, experts="gpu")
    assert chosen(str(tmp_path), "bf16", of_bytes(0.2), run).device == "cuda:0"


def test_an_expert_cache_that_pays() -> None:
    machine = find_machine("osdi26-5090")
    assert chosen("qwen3-30b", "bf16", machine).expert_cache == "auto"
    for given in (replace(OPEN, expert_cache="off"), replace(OPEN, experts="cpu")):
        assert not chosen("qwen3-30b", "bf16", machine, given).slots


@pytest.mark.parametrize(("tflops", "auto"), [(1e6, "ngram"), (1e-4, "off")])
def test_drafts_are_checked_where_reading_takes_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tflops: float, auto: str
) -> None:
    """As the plan says: more tokens multiply more, but read few experts more than one does."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    cpu = {**MACHINE["cpu"], "kernels": {"default": {"tflops": tflops}}}  # type: ignore[dict-item]
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "engine": MACHINE["engine"], "cpu": cpu}))
    plan = planned(str(tmp_path), "--machine", str(file), "--context", "64", "--prompt", "64")
    assert plan["drafts"]["auto"] == auto  # type: ignore[index]
    assert ("--draft auto" in str(plan["serve"])) == (auto == "ngram")

    def forecast(decoder: Lowerable, plan: ExecutionPlan, pool: object) -> Forecast:
        return Forecast(decoder, plan, read_machine(file))

    monkeypatch.setattr("model.planner.forecast.forecast_of", forecast)
    ids, texts = [5, 6, 7, 8] * 8, []
    for settings in ({"draft": "auto"}, {}, {"draft": "off"}):
        with model.load_engine(tmp_path, device="cpu", max_num_seqs=1, **settings) as llm:
            texts.append(llm.generate(ids, temperature=0, max_tokens=48, ignore_eos=True).token_ids)
            if settings != {"draft": "off"}:
                assert llm.engine.config.draft == ("auto" if auto == "ngram" else "off")
                said = any(line.startswith("drafts: ") for line in llm.decisions)
                assert said == (auto == "ngram" or bool(settings))
                assert (llm.engine.stats.accepted_tokens > 0) == (auto == "ngram")
    assert texts[0] == texts[1] == texts[2]


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.devices.gpus.usable_gpus", list)
    with model.load_engine(model.EMBEDDED, max_num_seqs=1) as llm:
        assert llm.runner.plan.placement.device == "cpu"
