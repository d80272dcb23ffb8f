"""Plans as data: where each weight lies and when it comes there, and what rates decide. No GPU is
asked, no weight is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import model
from model.architectures.decoder import Decoder
from model.llm import meta_decoder
from pykernels.errors import PykernelsError
from runtime.devices.cuda.layouts import CudaLayouts
from runtime.planning.compile import compile
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import ExecutionPlan, Phase, largest_step
from runtime.planning.gpu.dense import crossing_weights
from runtime.planning.gpu.machine import Machine
from runtime.planning.gpu.plan import place_on, plan_on_gpus
from runtime.planning.gpu.with_rates import (
    with_links,
    with_pinned,
    with_rates,
)
from runtime.planning.placement import Placement
from runtime.planning.prefill_rates import Rates
from runtime.planning.residency import Filled, Residency

GPU = "cuda:0"
MACHINE = Machine({GPU: 1 << 36}, CudaLayouts())
SIZES = largest_step(512, None, 512, 8)
LAYERS = range(1, 6)
"""Of routed experts, 32 each."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return meta_decoder(model.EMBEDDED)


def placed(decoder: Decoder, kind: str) -> Placement:
    placement, program = place_on(MACHINE, decoder, SIZES, "cpu"), decoder.lower()
    if kind == "some":
        return placement.with_experts(program, dict.fromkeys(LAYERS, (3, 5)))
    if kind == "slots":
        return placement.with_slots(program, dict.fromkeys(LAYERS, 4))
    if kind == "dense":
        plan = ExecutionPlan(SIZES, placement)
        return placement.with_residency(crossing_weights(decoder, MACHINE, plan, 0.0))
    return placement


def plan_of(decoder: Decoder, placement: Placement, **options: Any) -> ExecutionPlan:
    config = ExecutionConfig(GPU, experts="cpu", **options)
    return plan_on_gpus(config, decoder, MACHINE, 512, SIZES, placement)


@pytest.mark.parametrize(
    ("kind", "phase", "record", "count"),
    [
        ("some", Phase.DECODE, Residency(GPU, experts=(3, 5)), 5),
        ("slots", Phase.DECODE, Residency(GPU, Filled.BETWEEN_STEPS, slots=4), 5),
        ("slots", Phase.STREAMED, Residency(GPU, Filled.EACH_STEP), 5),
        ("all", Phase.STREAMED, Residency(GPU, Filled.EACH_STEP), 5),
        ("all", Phase.SPLIT, Residency(GPU, Filled.GATHERED, slots=8), 5),
        ("all", Phase.DECODE, Residency(GPU, Filled.EACH_STEP), 0),
    ],
)
def test_how_a_gpu_has_experts(
    kind: str, phase: Phase, record: Residency, count: int, decoder: Decoder
) -> None:
    """Beside all of them in main memory, on the CPU where that computes some."""
    plan = plan_of(decoder, placed(decoder, kind), prefill="stream")
    compiled = compile(decoder, plan, phase, 64, share=0.25)
    found = compiled.residency(GPU)
    assert Counter(found.values())[record] == count
    others = {each for each in found.values() if each != record}
    assert others == {Residency(GPU)}
    if phase is Phase.STREAMED:
        assert set(compiled.parts) == {GPU}
    else:
        assert set(compiled.residency("cpu").values()) == {Residency("cpu")}


def test_dense_weights_that_cross_take_no_memory_of_a_gpu(decoder: Decoder) -> None:
    placement = placed(decoder, "dense")
    crossing = placement.filled(Filled.EACH_STEP)
    assert {record.device for record in crossing.values()} == {GPU}
    plan = plan_of(decoder, placement, prefill="cpu")
    found = compile(decoder, plan, Phase.DECODE).residency(GPU)
    assert {name: each for name, each in found.items() if each.crosses} == crossing
    [line] = plan.decisions
    assert line.startswith("dense weights of 6 of 6 layers")


def test_what_a_rule_places_is_there(decoder: Decoder) -> None:
    name = "model.embed_tokens.weight"
    placement = place_on(MACHINE, decoder, SIZES, "cpu", {name: "cpu"})
    compiled = compile(decoder, ExecutionPlan(SIZES, placement))
    assert compiled.residency("cpu")[name] == Residency("cpu")
    assert name not in compiled.residency(GPU)


def test_rates_finish_a_plan(decoder: Decoder) -> None:
    """The link takes 150 ms, the CPU half a millisecond a token: 300 tokens are as fast."""
    plan = plan_of(decoder, placed(decoder, "all"), prefill="auto")
    assert plan.is_open and plan.prompts is None
    program = compile(decoder, plan).program
    plan = with_links(with_pinned(plan, program, LAYERS, ""), {GPU: 50e9})
    assert plan.is_open
    found = with_rates(plan, Rates(0.15, ((64, 0.032), (256, 0.128))), may_split=False)
    assert not found.is_open and found.prompts is not None
    assert found.prompts.streamed == (512,) and found.prompts.min_tokens == 301
    assert "all cross in 150 ms" in found.decisions[0]
    assert found.streaming is not None and found.streaming.links == {GPU: 50e9}
    assert replace(found, prompts=None, decisions=()) == replace(plan, measures_prompts=False)


def test_a_gpu_with_a_narrow_link_has_fewer_experts(decoder: Decoder) -> None:
    """Behind x16, x8 and x4, as measured: sixteen, eight and four parts of 28, and all end at the
    same time. What two measurements of one link differ by changes nothing."""
    every = "cuda:0", "cuda:1", "cuda:2"
    config = ExecutionConfig(",".join(every), experts="cpu", gpus="dslp", prefill="stream")
    links = dict(zip(every, (25.1e9, 12.9e9, 6.1e9), strict=True))
    machine = Machine(dict.fromkeys(every, 1 << 36), CudaLayouts(), links=lambda: links)
    plan = plan_on_gpus(config, decoder, machine, 512, SIZES)
    assert plan.streaming is not None
    assert plan.streaming.shares == dict(zip(every, (1, 0.5, 0.25), strict=True))
    assert "of the experts cuda:0 57%, cuda:1 29%, cuda:2 14%" in plan.decisions[-1]
    streamed = compile(decoder, replace(plan, stream_over=every), Phase.STREAMED, 512)
    loads = [n for part in streamed.parts.values() for n in part.nodes if n.op == "load_experts"]
    crossing = Counter[str]()
    for node in loads:
        crossing[node.device] += node.attr("count") if node.layer == LAYERS[0] else 0
    assert crossing == {"cuda:0": 18, "cuda:1": 9, "cuda:2": 5}  # of 32, each at least one
    took = with_links(plan, {"cuda:0": 28e9, "cuda:1": 14e9, "cuda:2": 7e9}).streaming
    program = compile(decoder, plan).program
    assert took is not None
    assert took.seconds(program, every) == pytest.approx(took.nbytes(program) / 49e9)
    near = dict(zip(every, (25.1e9, 24.2e9, 26.9e9), strict=True))
    alike = replace(machine, links=lambda: near)
    same = plan_on_gpus(config, decoder, alike, 512, SIZES).streaming
    assert same is not None and not same.shares
    given = replace(config, gpu_shares="2,1,1")
    asked = plan_on_gpus(given, decoder, machine, 512, SIZES).streaming
    assert asked is not None and asked.shares == dict(zip(every, (2, 1, 1), strict=True))


@pytest.mark.parametrize(
    ("gpus", "shares", "line"),
    [
        ("dslp", "1", "a positive number for each GPU of cuda:0,cuda:1, or auto"),
        ("dslp", "1,0", "a positive number"),
        ("dslp", "1,x", "a positive number"),
        ("tensor", "2,1", "with gpus tensor"),
        ("auto", "2,1", "cuda:0,cuda:1 share no prompt"),
    ],
)
def test_shares_that_cannot_be(gpus: str, shares: str, line: str, decoder: Decoder) -> None:
    every = "cuda:0", "cuda:1"
    with pytest.raises(PykernelsError, match=line):
        config = ExecutionConfig(",".join(every), gpus=gpus, gpu_shares=shares)
        machine = Machine(dict.fromkeys(every, 1 << 36), CudaLayouts())
        plan_on_gpus(config, decoder, machine, 512, SIZES)


def test_what_cannot_be_pinned_is_not_streamed(decoder: Decoder) -> None:
    for prefill, layers in ("auto", ()), ("stream", (1,)):
        plan = plan_of(decoder, placed(decoder, "all"), prefill=prefill)
        program = compile(decoder, plan).program
        with pytest.warns(UserWarning, match=f"of {len(layers)} of 5 layers .*: a limit"):
            plan = with_pinned(plan, program, layers, "a limit")
        assert plan.is_open == bool(layers) == (plan.streaming is not None)
    for prefill, layers in ("stream", ()), ("split", (1,)):
        plan = plan_of(decoder, placed(decoder, "all"), prefill=prefill)
        with pytest.raises(PykernelsError, match="cannot be streamed: a limit"):
            with_pinned(plan, program, layers, "a limit")
