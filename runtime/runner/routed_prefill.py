"""Streamed prompts by several routes, beside the steps of the GPU that decodes (OSDI'26 3.3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .batch import PrefillRunner, StepBatch, StepResult
from .paged_runner import Executable
from .routing import RoutedLayer


class RouteRunner(PrefillRunner, Protocol):
    """What runs the steps of one route."""

    steps: list[Executable]
    """Its programs, once it is bound."""

    def bind(self, batch: StepBatch) -> None:
        """See ``PagedRunner``."""
        ...


class RoutedPrefill:
    """See ``runner.batch.PrefillRunner``: one of several runners takes each step.

    Args:
        by_route: them, by the names of their routes.
    """

    def __init__(self, by_route: Mapping[str, RouteRunner]) -> None:
        self._by_route = dict(by_route)
        self.routes: Sequence[str] = tuple(by_route)
        self.routed_layers: Sequence[RoutedLayer] = ()
        self._taken = one = next(iter(by_route.values()))
        self.page_size, self.num_pages, self.state_slots = one.page_size, one.num_pages, 0
        self.max_num_batched_tokens = one.max_num_batched_tokens
        self.max_num_seqs = one.max_num_seqs
        self.max_num_logits, self.max_model_len = one.max_num_logits, one.max_model_len
        self.vocab_size, self.deferred = one.vocab_size, one.deferred
        self.why_no_drafts = one.why_no_drafts
        self.min_tokens, self.min_alone = one.min_tokens, one.min_alone
        self.max_others = one.max_others
        self.steps: list[Executable] = []

    def bind(self, batch: StepBatch) -> None:
        """Binds the steps of all routes."""
        for runner in self._by_route.values():
            runner.bind(batch)
            self.steps = self.steps or runner.steps
        self.routed_layers = self._taken.routed_layers

    def take(self, route: str) -> None:
        self._taken = self._by_route[route]

    def launch(self, batch: StepBatch) -> None:
        self._taken.launch(batch)

    @property
    def least_seconds(self) -> float:
        """Of the fastest route."""
        return min(runner.least_seconds for runner in self._by_route.values())

    def park(self, seconds: float) -> None:
        self._taken.park(seconds)

    def resume(self) -> None:
        self._taken.resume()

    def ready(self) -> bool:
        return self._taken.ready()

    def result(self) -> StepResult:
        return self._taken.result()

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("no model with states has routes")
