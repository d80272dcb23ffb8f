"""Drafts of a sequence's next tokens: whatever they are, the text is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from runtime.engine import Completion, Engine, EngineConfig, SamplingParams

from .fake_runner import FakeRunner, Words, check_pages, draw, expected

VOCAB, WORDS = 97, ("a", "b", "ab", "c", "ba", "caa", "bb")


class Forced:
    """Drafts that a test knows: of each prompt, what its output will be.

    Args:
        change: makes other drafts of the right ones.
    """

    def __init__(self, change: Callable[[list[int]], list[int]] = list) -> None:
        self._outputs: list[tuple[list[int], list[int]]] = []
        self._change = change

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._outputs.append((list(prompt), [*prompt, *output]))

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for prompt, whole in self._outputs:
            if list(tokens) == whole[: len(tokens)] and len(tokens) > len(prompt):
                return self._change(whole[len(tokens) :])
        return []


def test_right_drafts_save_steps() -> None:
    runner, drafter = FakeRunner(), Forced(lambda right: right[:3])
    engine = Engine(runner, threaded=False, drafter=drafter)
    drafter.add([1, 2, 3], expected([1, 2, 3], 5, 21))
    [result] = engine.generate([[1, 2, 3]], SamplingParams(seed=5, max_tokens=21))
    assert result.token_ids == expected([1, 2, 3], 5, 21)
    assert runner.sizes == [3, *[4] * 5], "each step brings what it has checked, and one more"
    check_pages(engine._core.scheduler.manager, [])
