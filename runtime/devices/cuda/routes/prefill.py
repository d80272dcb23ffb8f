"""Streamed prompts by several routes, beside the steps of the GPU that decodes (OSDI'26 3.3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ....kv_cache.layout import PAGE
from ....planning.execution import ExecutionPlan
from ....runner.batch import StepBatch, StepResult
from ....runner.expert_slots import ExpertSlots
from ....runner.paged_runner import Executable
from ....runner.routing import RoutedLayer
from ..resources import CudaResources
from ..streamed_runner import StreamedRunner
from .replicas import Replicas, pages_before


class RouteRunner(StreamedRunner):
    """Streamed steps on the GPUs of one route.

    Args:
        resources: of these GPUs alone; ``plan``: with them as ``stream_over``.
        slots: see ``StreamedRunner``.
        name: of the route.
        replicas: the caches of all GPUs.
    """

    def __init__(
        self,
        resources: CudaResources,
        plan: ExecutionPlan,
        slots: ExpertSlots | None,
        name: str,
        replicas: Replicas,
    ) -> None:
        super().__init__(resources, plan, slots)
        self.routes = (name,)
        self._over, self._first, self._replicas = plan.stream_over, plan.placement.device, replicas
        self._pages = np.zeros(0, np.int64)
        self._back: torch.cuda.Event | None = None

    def launch(self, batch: StepBatch) -> None:
        slots = batch.slot_mapping[: batch.T]
        before = batch.seq_lens[: batch.S] - batch.num_scheduled
        rows = batch.page_table_rows[: batch.S]
        with self._resources.watched(), self._own_streams():
            pages = pages_before(batch.page_tables, rows, before)
            self._replicas.bring(pages, self._over)
            super().launch(batch)
            self._replicas.written(slots, self._over)
            self._pages, self._back = np.unique(slots // PAGE), None
            if self._first not in self._over and self._resources.real:
                self._back = self._replicas.give_back(self._pages, self._over[0])

    def ready(self) -> bool:
        return super().ready() and (self._back is None or self._back.query())

    def result(self) -> StepResult:
        step_result = super().result()
        if self._back is not None:
            with self._resources.watched():
                self._back.synchronize()
        elif self._first not in self._over:  # in Triton's interpreter a thread plays the stream
            self._replicas.give_back(self._pages, self._over[0])
        return step_result


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
        self.max_num_batched_tokens, self.max_num_seqs = (
            one.max_num_batched_tokens,
            one.max_num_seqs,
        )
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

    def ready(self) -> bool:
        return self._taken.ready()

    def result(self) -> StepResult:
        return self._taken.result()

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("no model with states has routes")
