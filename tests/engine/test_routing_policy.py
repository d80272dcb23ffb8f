"""The rules of OSDI'26 3.3.2, with its thresholds, and steps that take the ways they choose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from model import EMBEDDED, load_engine
from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig, SamplingParams
from runtime.engine.scheduling.routing_policy import RoutingPolicy
from runtime.planning.config import ExecutionConfig
from runtime.runner.route import Route

from .test_prefill_stream import TwoStreams

BOTH = Route.DSLP, Route.DISAGGREGATED
PAPER = RoutingPolicy(chunked_below=2048, dslp_after=300)


@pytest.mark.parametrize(
    ("tokens", "idle", "route"),
    [
        (2047, 0, Route.CHUNKED),  # "chunked prefill for short requests (e.g., <2K tokens)"
        (2047, math.inf, Route.CHUNKED),
        (2048, 300, Route.DSLP),  # "no decode requests within a short window (e.g., 5 minutes)"
        (85_000, math.inf, Route.DSLP),
        (2048, 299, Route.DISAGGREGATED),  # "otherwise, route to disaggregated SLP"
        (85_000, 0, Route.DISAGGREGATED),
    ],
)
def test_routes_are_the_papers(tokens: int, idle: float, route: str) -> None:
    least = PAPER.least(turning_point=700, chunks=True)
    assert PAPER.route(BOTH, tokens, least, idle) == route


def test_what_is_measured_says_how_short_is_chunked() -> None:
    """Unless it is set; and nothing is where the main runner takes no prompts."""
    assert RoutingPolicy().least(turning_point=700, chunks=True) == 700
    assert PAPER.least(turning_point=700, chunks=False) == 1
    assert PAPER.route((Route.DSLP,), 1, 1, 0) == Route.DSLP


def test_prompts_beside_answers_are_read_on_the_other_gpus() -> None:
    now = 1000.0
    runner = TwoStreams(num_pages=64, vocab_size=97, max_num_batched_tokens=24)
    prefill = runner.prefill_runner
    prefill.routes = BOTH
    config = EngineConfig(dslp_after=60)
    engine = Engine(runner, threaded=False, config=config, clock=lambda: now)
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def read(*seeds: int) -> None:
        asked = [engine.submit([seed] * 24, params) for seed in seeds]
        while engine.step():
            pass
        for handle in asked:
            handle.result()

    read(1)
    now += 5
    read(2)  # one conversation: nobody's tokens are held up
    assert prefill.taken == [Route.DSLP, Route.DSLP]
    read(3, 4)  # the second prompt is read while the first answer is written
    assert prefill.taken[2:] == [Route.DSLP, Route.DISAGGREGATED]
    now += 59
    read(5)
    now += 61
    read(6)
    assert prefill.taken[4:] == [Route.DISAGGREGATED, Route.DSLP]
    assert tuple(engine.decisions) == (
        "prompts: below 12 tokens beside answers, longer ones in steps of their own, on all GPUs"
        " where nothing decodes for 60 s, else on a GPU on which nothing decodes",
    )
    assert engine.stats.prompt_steps == {Route.DSLP: 4, Route.DISAGGREGATED: 2}


def test_ways_that_a_machine_does_not_have_are_refused() -> None:
    with pytest.raises(PykernelsError, match="chunked_below=9 where no prompt has a step of its"):
        load_engine(EMBEDDED, chunked_below=9)
    one = ExecutionConfig(device="cuda:0", prefill="stream")
    with pytest.raises(PykernelsError, match="chunked_below=9 where"):
        EngineConfig(chunked_below=9, prefill_yield=0).check_ways(one)
    with pytest.raises(PykernelsError, match="prefill_yield=0 where"):
        EngineConfig(prefill_yield=0).check_ways(replace(one, experts="gpu"))
    with pytest.raises(PykernelsError, match="dslp_after=1.5 without a choice of GPUs"):
        EngineConfig(dslp_after=1.5).check_ways(one)
    both = replace(one, device="cuda:0,cuda:1", gpus="routed")
    EngineConfig(dslp_after=1.5).check_ways(both)
    faults: list[dict[str, Any]] = [
        {"chunked_below": 0},
        {"prefill_yield": 1.0},
        {"dslp_after": math.nan},
    ]
    for wrong in faults:
        with pytest.raises(PykernelsError, match=next(iter(wrong))):
            EngineConfig(**wrong)
