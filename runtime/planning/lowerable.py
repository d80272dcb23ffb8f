"""What a model must offer, so that it can be planned and run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from ..kv_cache.layout import CachePart
from ..program import Program
from ..program.sizes import ONE_TOKEN, StepSizes
from ..program.weights import WeightStore

Pass = Callable[[Program], Program]
"""Rewrites a program (``runtime.passes``)."""


class Lowerable(Protocol):
    """A model, from which programs are lowered."""

    @property
    def store(self) -> WeightStore:
        """Its weights."""

    @property
    def name(self) -> str:
        """The architecture's name."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def states(self) -> Collection[str]:
        """The cache's buffers that are states of sequences, [state_slots, ...]."""

    def caches(self, pages: int, state_slots: int = 1) -> Mapping[str, CachePart]:
        """The cache's buffers: of so many pages, and slots of states."""

    def thinned(self, most: int) -> tuple[Lowerable, float]:
        """The same with so many of its layers at most, of each kind a part like the whole's, and
        how many of its own layers each stands for: to predict by, not to run."""

    def lower(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The program of a step of these sizes."""
