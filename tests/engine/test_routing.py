"""Whose experts are whose, in mixed batches and behind a preemption; observed steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, SamplingParams, StepBatch, StepResult
from runtime.runner.routing import NO_EXPERT, LayerRouting, RoutedLayer

from .fake_runner import FakeRunner, expected
from .test_drafts import Known

LAYERS = RoutedLayer(1, 64, 2), RoutedLayer(4, 32, 3)


@dataclass
class Routed(FakeRunner):
    """Token t at position p goes to t and p in the first layer, to t, p and 7 in the second."""

    routed_layers = LAYERS

    def step(self, batch: StepBatch) -> StepResult:
        result = super().step(batch)
        t, p = batch.tokens % 64, batch.positions % 32
        seven = np.full_like(t, 7)
        weights = np.ones((len(t), 3), np.float32)
        result.routing = [
            LayerRouting(np.stack([t, p], 1), weights[:, :2]),
            LayerRouting(np.stack([t, p, seven], 1), weights),
        ]
        return result


@pytest.mark.parametrize("drafts", [False, True])
def test_each_token_has_its_own_experts(drafts: bool) -> None:
    """With drafts too, behind which an output ends, in the middle of those that were right."""
    runner = Routed(num_pages=14, vocab_size=64)
    params = [SamplingParams(max_tokens=20, routed_experts=True, seed=i) for i in range(3)]
    prompts = [list(range(first, first + size)) for first, size in ((1, 5), (20, 18), (40, 9))]
    drafter = Known(lambda right: [*right[:3], 63])
    if drafts:
        outputs = [expected(prompt, seed, 20, 64) for seed, prompt in enumerate(prompts)]
        for prompt, output in zip(prompts, outputs, strict=True):
            drafter.add(prompt, output)
        params[0] = replace(params[0], stop_token_ids=[outputs[0][6]])
    with Engine(runner, threaded=False, drafter=lambda: drafter) as engine:
        results = engine.generate(prompts, params)
        assert engine.stats.preemptions
        assert bool(engine.stats.accepted_tokens) == drafts
    for result in results:
        (output,) = result.completions
        routed = output.routed_experts
        assert routed is not None and routed.first == output.stats.cached_tokens == 0
        tokens = [*result.prompt_ids, *output.token_ids][:-1]
        wanted = [[[t, p % 32, NO_EXPERT], [t, p % 32, 7]] for p, t in enumerate(tokens)]
        assert routed.ids.tolist() == wanted


@dataclass
class Seen:
    """An observer that counts; ``fails``: it cannot read what it has seen."""

    fails: bool = False
    inside: bool = False
    steps: list[int] = field(default_factory=list)

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *error: object) -> None:
        self.inside = False

    @contextmanager
    def step(self) -> Iterator[None]:
        yield
        self.steps.append(1)
        if self.fails:
            raise PykernelsError("too much to read", "Read less")


def test_some_steps_are_observed() -> None:
    with Engine(FakeRunner(), threaded=False) as engine:

        def generate(seed: int) -> int:
            params = SamplingParams(max_tokens=8, seed=seed)
            return len(engine.generate([[1, 2, 3]], params)[0].token_ids)

        seen, failing, late = Seen(), Seen(fails=True), Seen()
        done, second = engine.observe(seen, 3), engine.observe(late, 1)
        generate(1)
        assert done.result(0) is None and len(seen.steps) == 3 and not seen.inside
        with pytest.raises(PykernelsError, match="observed already"):
            second.result(0)
        failed = engine.observe(failing, 3)
        assert generate(2) == 8
        with pytest.raises(PykernelsError, match="too much to read"):
            failed.result(0)
        assert not failing.inside
        cancelled = engine.observe(late, 1)
        assert cancelled.cancel()
        generate(3)
        waiting = engine.observe(late, 9)
    assert not late.steps
    with pytest.raises(PykernelsError, match="closed"):
        waiting.result(0)
