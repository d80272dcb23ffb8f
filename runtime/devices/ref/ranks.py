"""Several ranks on the ref device: each has a thread, a program and buffers of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from pykernels.errors import PykernelsError

from ...passes.gpu_experts import expert_slot_tables
from ...passes.shard import join, replica, shard, stripe
from ...passes.shard.stripes import places, stripe_tokens
from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan
from ...planning.lowerable import Lowerable
from ...program import Program
from ...program.op_table.collectives import ALL_TOKENS
from ...program.step_inputs import allocate_inputs
from ...program.weights import WeightStore
from ...runner.batch import DeviceLost
from ..collectives import Communicator, ThreadGroup, lost
from ..stripe_inputs import deal_inputs
from .runner import RefRunner
from .step import REF, RefExecutable


class RanksExecutable:
    """The programs of all ranks as one step.

    Args:
        programs: by rank (``passes.shard``); or the one program that they are joined to.
        inputs: by name, tensors of the programs' inputs, which all ranks read.
        caches: by program and name, tensors of the "cache" buffers.
        ends: by program, where it meets the others; None: it meets none.
        sizes: as ``Program.step_sizes``; None for its own.

    Attributes:
        ranks: by rank, the step of each. outputs: by name, of rank 0.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        weights: WeightStore,
        inputs: Mapping[str, torch.Tensor],
        caches: Sequence[Mapping[str, torch.Tensor]],
        ends: Sequence[Communicator | None],
        sizes: torch.Tensor | None = None,
    ) -> None:
        self.program, self.inputs = programs[0], dict(inputs)
        self.sizes = programs[0].step_sizes() if sizes is None else sizes
        self.ranks = [
            RefExecutable(Compiled.of(program), weights, inputs, own, sizes=self.sizes, ranks=end)
            for program, own, end in zip(programs, caches, ends, strict=True)
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
        errors: dict[int, BaseException] = {}
        for rank, step in enumerate(self.ranks):
            try:
                step.result()
            except BaseException as error:
                errors[rank] = error
        if not errors:
            return
        # Those that only lost another one come after it.
        first = next((r for r, e in errors.items() if not isinstance(e, DeviceLost)), min(errors))
        failure = errors[first]
        if isinstance(failure, DeviceLost) or not isinstance(failure, Exception):
            raise failure
        raise DeviceLost(*lost(first, failure)) from failure


class StripedExecutable(RanksExecutable):
    """A step whose tokens are dealt over the ranks.

    Args:
        program: of the whole step; ``programs``: by rank (``passes.shard.stripe``).
        inputs: by name, tensors of the whole step's inputs.
        sizes: T, S and R of the whole step.
        ranks: over which tokens are dealt. Other arguments: see ``RanksExecutable``.

    Attributes:
        outputs: by name, of the whole step.
    """

    def __init__(
        self,
        program: Program,
        programs: Sequence[Program],
        weights: WeightStore,
        inputs: Mapping[str, torch.Tensor],
        caches: Sequence[Mapping[str, torch.Tensor]],
        ends: Sequence[Communicator | None],
        sizes: torch.Tensor,
        ranks: int,
    ) -> None:
        self._count = ranks
        self._step, self._whole = sizes, dict(inputs)
        own = {name: value for one in programs for name, value in allocate_inputs(one).items()}
        super().__init__(programs, weights, own | self._whole, caches, ends)
        self.program, self._own = program, own
        self._dealt = {
            name: torch.zeros(program.shape(name), dtype=value.dtype, device="cpu")
            for name, value in self.outputs.items()
            if programs[0].buffers[name].shape[0] == ALL_TOKENS
        }
        self._gathered = {name: self.outputs[name] for name in self._dealt}
        self.outputs = {**self.outputs, **self._dealt}
        self._places = torch.zeros(0, dtype=torch.int64, device="cpu")

    def launch(self) -> None:
        T, S, R = self._step[:3].tolist()
        ranks, room = self._count, stripe_tokens(T, self._count)
        tokens = np.arange(T, dtype=np.int64)
        self._places = torch.from_numpy(places(tokens, T, ranks, room))
        sizes = room, S, R, 0, 0, ranks * room
        self.sizes[:] = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        deal_inputs(self._whole, self._own, ranks, (T, S, R), room)
        super().launch()

    def result(self) -> None:
        super().result()
        for name, rows in self._gathered.items():
            self._dealt[name][: len(self._places)] = rows[self._places]


class RanksRunner(RefRunner):
    """A model on several ranks of the ref device: each has some heads and some experts.

    Args:
        plan: all on the ref device, of the whole model; where it streams, a rank copies its own
            experts first in steps with chunks of prompts.
        ranks: how many.
        striped: whether steps with chunks of prompts deal their tokens over the ranks; every rank
            then has keys and values of all heads.
        experts: of ``passes.shard.EXPERTS``, in these steps; ``attention``: of ``ATTENTION``.
        ends: by rank, where it meets the others; None: threads meet in this process's memory.
        joined: whether all ranks are parts of one program, as on GPUs.
        shares: of the experts, by rank, in these steps (``passes.shard.stripe``).

    Raises:
        PykernelsError: more ranks than there are heads or experts; what ``shard`` refuses; deferred
            experts where prompts are streamed.
    """

    def __init__(
        self,
        model: Lowerable,
        plan: ExecutionPlan,
        ranks: int,
        striped: bool = False,
        experts: str = "small_ep",
        attention: str = "ring",
        ends: Sequence[Communicator] | None = None,
        joined: bool = False,
        shares: Sequence[float] = (),
    ) -> None:
        if plan.streaming is not None and plan.deferred:
            raise PykernelsError(
                f"{ranks} ranks that stream prompts and defer experts", "Leave out one of both"
            )
        self._streaming = plan.streaming
        self.ranks, self.striped, self.experts = ranks, striped and ranks > 1, experts
        self.attention, self._shares = attention, shares
        apart = self.striped or plan.streaming is not None  # decode steps are others
        decode = plan.decode_buckets or (plan.buckets if apart else ())
        super().__init__(model, replace(plan, streaming=None, decode_buckets=decode))
        self._joined = joined
        self._ends: Sequence[Communicator | None] = (
            ThreadGroup(ranks).ranks if ends is None else ends
        )
        self.caches = {}
        self._caches = [caches_of(own) for own in self._sharded(self._largest())]
        if joined:
            self._ends = (None,)
            self._caches = [
                {
                    replica(name, device) if rank else name: cache
                    for rank, (device, caches) in enumerate(
                        zip(self._devices, self._caches, strict=True)
                    )
                    for name, cache in caches.items()
                }
            ]

    def load(self) -> None:
        programs = self._sharded(self._largest())
        self.weights.load(*((program, self.layouts(program)) for program in programs))

    def make_step(  # type: ignore[override]
        self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]
    ) -> RanksExecutable:
        program = compiled.program
        if compiled.decodes or not self.striped:
            programs = self._sharded(program)
        else:
            form = self.experts, self.attention, self._shares
            programs = stripe(program, self.ranks, *form)
        if self._streaming is not None and not compiled.decodes:
            programs = tuple(map(self._streaming.apply, programs))
        if self._joined:
            programs = (join(programs, self._devices).on(REF),)
        bound = self.weights, inputs, self._caches_of(programs), self._ends, self.sizes
        if self.striped and not compiled.decodes:
            return StripedExecutable(program, programs, *bound, self.ranks)
        return RanksExecutable(programs, *bound)

    @property
    def _devices(self) -> list[str]:
        """The devices of joined ranks, which this one then plays."""
        return [REF, *(f"{REF}:{rank}" for rank in range(1, self.ranks))]

    def _largest(self) -> Program:
        return self.compiled(tokens=self.max_num_batched_tokens).program

    def _caches_of(self, programs: Sequence[Program]) -> list[dict[str, torch.Tensor]]:
        """Keys and values of each rank, and which experts it has."""
        return [
            own | expert_slot_tables(program)
            for own, program in zip(self._caches, programs, strict=True)
        ]

    def _sharded(self, program: Program) -> tuple[Program, ...]:
        return shard(program, self.ranks, heads=not self.striped)


def caches_of(program: Program) -> dict[str, torch.Tensor]:
    """Zeros for a rank's pages of keys and values."""
    return {
        name: torch.zeros(program.shape(name), dtype=buffer.dtype, device="cpu")
        for name, buffer in program.buffers.items()
        if buffer.kind == "cache" and buffer.dtype != torch.int32
    }
