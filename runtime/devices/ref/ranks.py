"""Several ranks on the ref device: each has a thread, a program and buffers of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...passes.shard import expert_tables, shard
from ...program import Program
from ...program.weights import WeightStore
from ...runner.paged_runner import Lowerable
from ..collectives import LIMIT_S, ThreadGroup
from .runner import RefRunner
from .step import RefExecutable


class RanksExecutable:
    """The programs of all ranks as one step.

    Args:
        programs: by rank (``passes.shard``).
        inputs: by name, tensors of the programs' inputs, which all ranks read.
        caches: by rank and name, tensors of the "cache" buffers.
        sizes: as ``Program.step_sizes``; None for its own.
        limit_s: how long a rank waits for another one.

    Attributes:
        outputs: by name, of rank 0.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        weights: WeightStore,
        inputs: Mapping[str, torch.Tensor],
        caches: Sequence[Mapping[str, torch.Tensor]],
        sizes: torch.Tensor | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.program, self.inputs = programs[0], dict(inputs)
        self.sizes = programs[0].step_sizes() if sizes is None else sizes
        self._group = ThreadGroup(len(programs), limit_s)
        self.ranks = [
            RefExecutable(program, weights, inputs, own, sizes=self.sizes, ranks=end)
            for program, own, end in zip(programs, caches, self._group.ranks, strict=True)
        ]
        self.outputs = self.ranks[0].outputs

    def run(self) -> None:
        """One step; raises as ``result``."""
        self.launch()
        self.result()

    def launch(self) -> None:
        """Begins a step on all ranks."""
        for rank in self.ranks:
            rank.launch()

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            DeviceLost: a rank has failed, and with it all of them.
        """
        errors = list[BaseException]()
        for rank in self.ranks:
            try:
                rank.result()
            except BaseException as error:
                errors.append(error)
        if self._group.failure is not None:
            raise self._group.failure from None
        if errors:
            raise errors[0]


class RanksRunner(RefRunner):
    """A model on several ranks of the ref device: each has some heads and some experts.

    Args:
        ranks: how many. Other arguments: see ``RefRunner``.

    Raises:
        PykernelsError: in ``load``, more ranks than there are heads or experts.
    """

    def __init__(
        self,
        model: Lowerable,
        ranks: int,
        max_model_len: int,
        num_pages: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        max_num_logits: int | None = None,
        dual_batch: bool = False,
        deferred: int = 0,
    ) -> None:
        super().__init__(
            model,
            max_model_len,
            num_pages,
            max_num_batched_tokens,
            max_num_seqs,
            max_num_logits=max_num_logits,
            dual_batch=dual_batch,
            deferred=deferred,
        )
        self.ranks = ranks
        self.caches = {}
        self._caches = [caches_of(own) for own in shard(self.lowered(self.step_sizes()), ranks)]

    def load(self) -> None:
        for program in shard(self.lowered(self.step_sizes()), self.ranks):
            self.weights.load(program, self.layouts(program))

    def make_step(  # type: ignore[override]
        self, program: Program, inputs: Mapping[str, torch.Tensor]
    ) -> RanksExecutable:
        programs = shard(program, self.ranks)
        caches = [own | expert_tables(one) for own, one in zip(self._caches, programs, strict=True)]
        return RanksExecutable(programs, self.weights, inputs, caches, self.sizes)


def caches_of(program: Program) -> dict[str, torch.Tensor]:
    """Zeros for a rank's pages of keys and values."""
    return {
        name: torch.zeros(program.shape(name), dtype=buffer.dtype, device="cpu")
        for name, buffer in program.buffers.items()
        if buffer.kind == "cache" and buffer.dtype != torch.int32
    }
