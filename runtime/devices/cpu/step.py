"""The ``cpu`` device: a program bound to memory, its nodes as jobs of the workers' ring.

A step is then one call: no line of Python runs between its nodes, and a node waits only for those
that it shares a buffer with (``analysis``).
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np
import torch

from pykernels.cpu import MoEWorkspace

from ...program import Program
from ...program.analysis import refuse_devices
from ...program.weights import WeightStore
from ...workers.fence import FencedJobs
from ...workers.job import Jobs
from ...workers.pool import WorkerPool
from ...workers.worker_pool import InFlight
from ..link import Link
from . import attention_ops, dense_ops, expert_ops
from .context import Binder, Context
from .delta_net_ops import DELTA_NETS

BINDERS: dict[str, Binder] = {
    "embed": dense_ops.embed,
    "rms_norm": dense_ops.rms_norm,
    "post_norm": dense_ops.post_norm,
    "softcap": dense_ops.softcap,
    "add": dense_ops.add,
    "linear": dense_ops.linear,
    "per_head_linear": dense_ops.per_head_linear,
    "rope_table": attention_ops.rope_table,
    "mla_rope_cache_write": attention_ops.mla_rope_cache_write,
    "gqa_rope_cache_write": attention_ops.gqa_rope_cache_write,
    "attention": attention_ops.attention,
    "attention_expanded": attention_ops.attention_expanded,
    "router": expert_ops.router,
    "split_routing": expert_ops.split_routing,
    "place_routing": expert_ops.place_routing,
    "moe_ffn": expert_ops.moe_ffn,
    **DELTA_NETS,
    "join_rows": dense_ops.join_rows,
    "sample_requests": dense_ops.sample_requests,
    "submit": lambda ctx, node: [ctx.flag_job(node)],
    "wait": lambda ctx, node: [ctx.flag_job(node)],
}
"""The ops of this device."""


class CpuExecutable:
    """A program that is ready to run on a pool.

    Args:
        program: with ops of ``BINDERS`` only, all on this device; in slices where the workers are
            dealt over NUMA nodes (``Compiled.parts``).
        weights: the weights of its model.
        inputs: by name, tensors of the program's input buffers, in their largest shape.
        caches: by name, tensors of the "cache" buffers.
        kernel: a backend of ``pykernels.registry``, or "auto".
        sizes: as ``Program.step_sizes``; None for its own.
        in_order: whether each node waits for the whole of the one before, whatever it reads.
        link: to the device that has the other half of the program, if it is half of one.
        gemm_from: tokens of a matrix from which it takes the GEMM; None: as this machine was
            calibrated.
        workspaces: scratch of experts, shared with programs that never run at the same time; None:
            its own.

    Attributes:
        sizes: T, S and R of the step to come; set it before ``run``.
        outputs: by name, tensors of the "output" buffers.

    Raises:
        PykernelsError: an op that this device does not have, an input that is not given or of
            another dtype, a norm's output that is read as floats, a kernel that cannot run here.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightStore,
        pool: WorkerPool,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        kernel: str = "auto",
        sizes: torch.Tensor | None = None,
        in_order: bool = False,
        link: Link | None = None,
        gemm_from: int | None = None,
        workspaces: dict[str, MoEWorkspace] | None = None,
    ) -> None:
        self.program, self.pool = program, pool
        self.sizes = self.program.step_sizes() if sizes is None else sizes
        refuse_devices(program, "cpu")
        self._context = Context(
            self.program,
            weights,
            pool,
            inputs,
            caches,
            kernel,
            self.sizes,
            in_order,
            link,
            gemm_from,
            workspaces,
        )
        self.jobs = Jobs(self._context.bind(BINDERS))
        self.outputs = self._context.outputs
        self._in_flight: InFlight | None = None
        self._before: InFlight | None = None
        self._fenced: list[FencedJobs] = []
        self._behind: InFlight | None = None

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts, routed or not, that the last step read: those that a token took."""
        return sum(call.active * call.experts.bytes_per_expert for call in self._context.calls)

    def run(self) -> None:
        """One step; the first of many tokens compiles what only such steps need.

        Raises:
            TaskError: a task failed.
        """
        self.prepare()
        self.pool.run(self.jobs)

    def launch(self) -> InFlight:
        """Begins a step; ``pool.wait`` ends it, and says in ``error`` whether a task failed; or
        ``result`` does both."""
        self.prepare()
        self._before, self._in_flight, self._behind = self._in_flight, None, None
        self._in_flight = self.pool.start(self.jobs, self)
        return self._in_flight

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            TaskError: a task failed.
        """
        assert self._in_flight is not None, "no step was launched"
        self.pool.wait(self._in_flight)
        if self._in_flight.error is not None:
            raise self._in_flight.error

    def launch_behind(
        self,
        inputs: np.ndarray,
        next_inputs: np.ndarray,
        S: int,
        ends: Set[int],
        give_up: np.ndarray,
    ) -> bool:
        """Puts the next step of the same sizes into the ring while one runs, which brings it the
        tokens; ``result`` of that one says whether it runs.

        Args:
            inputs: int64 [columns, N], which the program reads; row 0 holds the tokens.
            next_inputs: the same for the step to come; row 0 is not read.
            S: sequences, with one token each.
            ends: tokens that end one of them: the step is given up where one is drawn.
            give_up: int64 [1], not 0 where another step is to come.

        Returns:
            False where the ring has no room for it.
        """
        assert self._in_flight is not None and not self._context.uncompiled_for(int(self.sizes[0]))
        if not self._fenced:  # one runs while the other one waits
            drawn = self.outputs["sampled_token_ids"].numpy()
            self._fenced = [
                FencedJobs(self.jobs, self.pool.ring, inputs, drawn, give_up) for _ in range(2)
            ]
        fenced = self._fenced[-1]
        if not self.pool.has_entries(fenced.jobs):
            return False
        self._fenced.reverse()
        self._behind = self.pool.start_behind(
            fenced.jobs, self, lambda head: fenced.arrange(next_inputs, S, ends, head)
        )
        return True

    def next_runs(self) -> np.ndarray | None:
        """Tokens that the step of ``result`` has drawn, if the step that was launched behind it
        runs; None if that one was given up, or there is none."""
        behind, self._behind = self._behind, None
        if behind is None:
            return None
        self.pool.wait_for_fence(behind)
        if not self._fenced[0].passed:
            return None
        self._before, self._in_flight = self._in_flight, behind
        return self._fenced[0].kept

    @property
    def ended(self) -> InFlight | None:
        """The last step that has ended, if it was launched."""
        now = self._in_flight
        return now if now is not None and now.done else self._before

    def prepare(self) -> None:
        """Compiles what a step of ``sizes`` needs and no smaller one has needed."""
        if self._context.uncompiled_for(tokens := int(self.sizes[0])):
            self._compile(tokens)

    def _compile(self, tokens: int) -> None:
        context = self._context
        for lazy in context.uncompiled:
            if lazy.tokens <= tokens:
                lazy.prepare()
        self._fenced = []
        context.uncompiled = [lazy for lazy in context.uncompiled if tokens < lazy.tokens]
