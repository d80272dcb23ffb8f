"""Drafts through the engine on real programs: the text is the one without them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import model
from model.llm import LLM
from pykernels.errors import PykernelsError
from pykernels.registry import kernels
from pykernels.target import detect
from runtime.engine import Engine, EngineConfig, Result, SamplingParams
from runtime.runner.paged_runner import PagedRunner

from ..cpu.kernels import fastest
from ..engine.test_drafts import Known
from ..runners import cpu_runner, ref_runner
from . import tiny

PROMPTS = ("def quicksort(xs):", "class Stack:\n    def __init__(self):", "    raise ValueError(")
PARAMS = (
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(seed=3, temperature=0.9, top_k=30, max_tokens=24, ignore_eos=True, logprobs=0),
    SamplingParams(seed=2, max_tokens=20, min_tokens=9, top_p=0.9, logprobs=0, stop_token_ids=[13]),
)
HOW: dict[str, Callable[[random.Random, list[int]], list[int]]] = {
    "right": lambda rng, right: right[:4],
    "wrong": lambda rng, right: [right[0] + 1, *right[1:3]],
    "partly right": lambda rng, right: [*right[:2], 7, *right[3:5]],
    "random": lambda rng, right: [rng.randrange(500) for _ in range(4)],
    "too many": lambda rng, right: [*right, *right],
}
APART = {"cpu": (0.1, 0.005), "ref": (1e-4, 1e-5)}
"""Log-probabilities differ by at most so much, and in the median: where a step has more tokens the
order of sums is another."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with model.load_engine(model.EMBEDDED, kernel=fastest()) as made:
        yield made


def make_runner(llm: LLM, device: str) -> PagedRunner:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_num_logits": 64}
    if device == "ref":
        return ref_runner(llm.runner.model, 128, 12, **sizes)
    return cpu_runner(llm.runner.model, llm.pool, 128, 12, **sizes, kernel=llm.kernel)


def serve(llm: LLM, runner: PagedRunner, drafter: Known | None) -> tuple[list[Result], int]:
    make = None if drafter is None else lambda: drafter
    config = EngineConfig(draft_tokens=24)
    with Engine(runner, threaded=False, config=config, drafter=make) as engine:
        found = engine.generate([llm.encode(prompt) for prompt in PROMPTS], PARAMS)
        return found, engine.stats.steps


@pytest.mark.parametrize("device", APART)
def test_drafts_change_nothing_but_the_number_of_steps(llm: LLM, device: str) -> None:
    plain, before = serve(llm, make_runner(llm, device), None)
    rng, steps, apart = random.Random(3), dict[str, int](), list[float]()
    for name, change in HOW.items():
        if device == "ref" and name in ("wrong", "random"):  # it is slow
            continue
        drafter = Known(partial(change, rng))
        for result in plain:
            drafter.add(result.prompt_ids, result.token_ids)
        drafted, steps[name] = serve(llm, make_runner(llm, device), drafter)
        for one, other in zip(plain, drafted, strict=True):
            assert one.token_ids == other.token_ids, name
            pairs = zip(one.completions[0].logprobs, other.completions[0].logprobs, strict=True)
            apart += [abs(a.logprob - b.logprob) for a, b in pairs]
    assert steps["too many"] < steps["right"] < steps["partly right"] < before
    assert steps.get("wrong", before) == before
    most, middle = APART[device]
    assert max(apart) < most and median(apart) < middle


def test_prompt_lookup_saves_steps_of_a_text_that_repeats_itself(llm: LLM) -> None:
    """The second one with as many biased tokens as a sequence may have, or nearly."""
    ids = llm.encode("x = [1, 2, 3]\n" * 12)
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    biased = replace(greedy, logit_bias=dict.fromkeys(range(4000), 1.0))
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 1, "draft_tokens": 5}
    with model.load_engine(model.EMBEDDED, kernel=fastest(), draft="ngram", **settings) as drafting:
        for params in (greedy, biased):
            [plain] = llm.engine.generate([ids], params)
            before = drafting.engine.stats
            [found] = drafting.engine.generate([ids], params)
            after = drafting.engine.stats
            assert found.token_ids == plain.token_ids
            assert after.steps - before.steps < 24
            assert after.accepted_tokens - before.accepted_tokens > 24


FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "gemma4_text": {"sliding_window": 100},
    "gpt_oss": {"sliding_window": 300},
    "qwen3_moe": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_depends_on_drafts(family: str, tmp_path: Path) -> None:
    """On a CPU, over a text that is longer than attention's splits of keys."""
    gains = tiny.Gains(layers=0.7, head=0.5, router=0.5, choice=0.1)
    sizes = {"max_position_embeddings": 1200, **FAMILIES[family]}
    tiny.make(tmp_path, family, gains=gains, **sizes)
    ids = torch.randint(2, 96, (30,), generator=torch.Generator().manual_seed(1)).tolist() * 8
    few = dict.fromkeys(range(5, 8), 9.0)  # tokens, so that it repeats itself
    params = SamplingParams(
        temperature=0, max_tokens=760, ignore_eos=True, logprobs=0, logit_bias=few
    )
    here = [each.name for each in kernels() if each.supports("bf16", detect()) is None]
    for kernel in dict.fromkeys((fastest(), "avx2" if "avx2" in here else "generic")):
        how: dict[str, Any] = {"kernel": kernel, "threads": 1, "max_num_seqs": 1}
        found, drafts = [], {"draft": "off"}
        for _ in range(2):
            with model.load_engine(tmp_path, device="cpu", **how, **drafts) as llm:
                (result,) = llm.engine.generate([ids], params)
                logprobs = [each.logprob for each in result.completions[0].logprobs]
                found.append((result.token_ids, logprobs))
                most = min(4, llm.runner.batch_invariance.tokens - 1)
                drafts = {"draft": "ngram", "draft_tokens": most}
        assert found[0] == found[1]
        assert llm.engine.stats.accepted_tokens > 100


def test_auto_drafts_what_repeats_itself_and_nothing_else(llm: LLM) -> None:
    """The same text in fewer steps; of one that does not repeat itself few drafts are checked."""
    config = EngineConfig(draft="auto", draft_tokens=5)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    drawn = SamplingParams(seed=5, temperature=1.5, max_tokens=200, ignore_eos=True)
    asked = ("x = [1, 2, 3]\n" * 12, greedy), ("class Stack:", drawn)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 1, "max_num_logits": 6}
    runner = cpu_runner(llm.runner.model, llm.pool, 256, 12, **sizes, kernel=llm.kernel)
    even = map(float, count())  # each step takes as long as any other
    with Engine(runner, threaded=False, config=config, clock=even.__next__) as engine:
        checked, steps = list[int](), list[int]()
        for prompt, params in asked:
            ids, before = llm.encode(prompt), engine.stats
            [plain], [found] = (each.generate([ids], params) for each in (llm.engine, engine))
            assert found.token_ids == plain.token_ids
            checked.append(engine.stats.draft_tokens - before.draft_tokens)
            steps.append(engine.stats.steps - before.steps)
    assert steps[0] < 40 and checked[1] < 10


def test_drafts_with_streamed_prompts_are_refused() -> None:
    with pytest.raises(PykernelsError, match="draft='ngram' and prefill='stream'"):
        model.load_engine(model.EMBEDDED, device="ref", draft="ngram", prefill="stream")
    with pytest.raises(PykernelsError, match="draft_tokens=9 without drafts"):
        model.load_engine(model.EMBEDDED, draft_tokens=9)
