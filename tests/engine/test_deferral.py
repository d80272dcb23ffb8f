"""With deferral a text follows from its prompt alone, whatever else an engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import model
from runtime.engine import Completion, Engine, SamplingParams
from runtime.engine.requests.drafters import MakeDrafter
from runtime.experts.cache import CachePolicy

from ..model import tiny
from ..runners import ref_runner
from .test_drafts import Known

PROMPT = [7 * i % 90 + 3 for i in range(40)]
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
"""A page of 64 tokens and more, the first page of both kinds."""
OTHERS = [[(11 * i + n) % 90 + 3 for i in range(50)] for n in (1, 2)]

Make = Callable[..., Engine]
"""An engine with so many pages, and steps of 16 tokens."""


@pytest.fixture(scope="module", params=[{}, {1: 3, 2: 3}], ids=["plain", "expert cache"])
def make(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    path = tmp_path_factory.mktemp("tiny")
    tiny.make(path, "deepseek_v3")
    slots, policy = request.param, CachePolicy("lfu", swaps=2, half_life=4, margin=0)

    with model.load_engine(path, max_model_len=64, threads=1, device="ref") as llm:

        def made(pages: int, drafter: MakeDrafter | None = None) -> Engine:
            sizes = 192, pages, 16, 3
            how: dict[str, Any] = {"deferred": 1, "slots": slots, "policy": policy}
            runner = ref_runner(llm.runner.model, *sizes, max_num_logits=16, **how)
            return Engine(runner, threaded=False, drafter=drafter)

        yield made


def same(found: Completion, wanted: Completion) -> None:
    assert found.token_ids == wanted.token_ids
    for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_a_text_does_not_depend_on_its_neighbours(make: Make) -> None:
    alone = make(8).generate([PROMPT], PARAMS)[0].completions[0]

    engine = make(8)
    handle = engine.submit(PROMPT, PARAMS)
    others = []
    for step in range(30):  # prompts in steps in which it decodes
        if step in (5, 12):
            others.append(engine.submit(OTHERS[len(others)], PARAMS))
        engine.step()
    same(handle.result().completions[0], alone)

    longer = replace(PARAMS, max_tokens=90)  # which takes all pages
    _, result = make(3).generate([OTHERS[0], PROMPT], [longer, PARAMS])
    found = result.completions[0]
    assert found.stats.preemptions
    same(found, alone)


def test_a_text_does_not_depend_on_drafts(make: Make) -> None:
    """Which are tokens of an output, whatever program computes them."""
    [plain] = make(8).generate([PROMPT], PARAMS)
    known = Known(lambda right: [*right[:3], 9])
    known.add(PROMPT, plain.token_ids)
    engine = make(8, lambda: known)
    [found] = engine.generate([PROMPT], PARAMS)
    same(found.completions[0], plain.completions[0])
    assert engine.stats.steps < 20


def test_a_text_does_not_depend_on_what_is_cached(make: Make) -> None:
    """Its own first pages, or those of a text that has the same tokens as an answer."""
    engine = make(8)
    [first] = engine.generate([PROMPT], PARAMS)
    longer = [*PROMPT, *first.token_ids[:40]]
    [warm] = engine.generate([longer], PARAMS)
    [again] = engine.generate([longer], PARAMS)
    [cold] = make(8).generate([longer], PARAMS)
    assert again.completions[0].stats.cached_tokens == 64
    for found in (warm, again):
        same(found.completions[0], cold.completions[0])
