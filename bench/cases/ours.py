"""Our experts, timed in turns with the peers; and the same kernels under a static schedule.

The static schedule shows what dealing out tasks is worth: each stage is cut into one contiguous
share a thread and ends in a barrier for all, as a plain parallel loop would run it. The pool sees
one task a thread and stage, which runs its whole share. The calling thread alone converts the
inputs and sorts the routing.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numba import carray, types

from pykernels.cpu import MoECall, MoEWorkspace, make_kernel
from pykernels.cpu.intrin.sync import as_pointer, call_task
from pykernels.cpu.jit import task
from pykernels.cpu.moe.plan import plan
from pykernels.cpu.ops.moe import take_serially
from runtime.profiling.workload import RandomLayers, call_of
from runtime.workers.job import Job, Jobs


def split_name(name: str) -> tuple[str, str]:
    """ "avx512/int8" -> (backend, activations); bf16 is not written."""
    backend, _, activations = name.partition("/")
    return backend, activations or "bf16"


class Ours:
    """One backend on random layers, on the shared pool of the moment.

    Args:
        kernel: "avx512", or with other activations "avx512/int8".

    Raises:
        PykernelsError: the backend cannot run this format here.
    """

    def __init__(self, weights: RandomLayers, kernel: str) -> None:
        self.kernel, self.layers = kernel, weights.experts(*split_name(kernel))
        self._next = 0

    def prepare(self, T: int, ids: list[torch.Tensor]) -> None:
        """Takes the routings of the turns to come; the first call also compiles."""
        g = torch.Generator().manual_seed(1)
        shape = self.layers[0].shape
        self.x = torch.randn(T, shape.H, generator=g).to(torch.bfloat16)
        self.weights = torch.rand(T, shape.topk, generator=g)
        self.ids, self._next = ids, 0
        self._call()

    def turn(self, seconds: float, most: int = 1000) -> list[tuple[int, float]]:
        """About ``seconds`` of calls, at least one: (routing, seconds) of each."""
        calls: list[tuple[int, float]] = []
        end = time.perf_counter() + seconds
        while not calls or (time.perf_counter() < end and len(calls) < most):
            calls.append(self._call())
        return calls

    def _call(self) -> tuple[int, float]:
        layer, routing = call_of(self._next, len(self.layers), len(self.ids))
        self._next += 1
        start = time.perf_counter()
        self.run(layer, routing)
        return routing, time.perf_counter() - start

    def run(self, layer: int, routing: int) -> torch.Tensor:
        """One call; its [T, H] result."""
        return self.layers[layer](self.x, self.ids[routing], self.weights)


_STAGES = ("pack", "gate_up", "down")
_FIELDS = [f"{stage}_{what}" for stage in _STAGES for what in ("at", "units", "unit")]
SHARES = np.dtype([(name, np.int64) for name in ("job", "threads", *_FIELDS)])
"""A call's shares: the real job, then of each stage its task, how many units, tasks of a unit."""

_WORDS = len(SHARES.names or ())
_FIELD = {stage: 2 + 3 * i for i, stage in enumerate(_STAGES)}


@functools.cache
def make_share(stage: str) -> Any:
    """The task (``jit.TASK``; its job: ``SHARES``) that runs one thread's share of a stage."""
    first_word = _FIELD[stage]

    @task(f"static-{stage}")
    def share(shares, index, worker):
        words = carray(as_pointer(shares), (_WORDS,), types.int64)
        job, threads = words[0], words[1]
        function, units, unit = words[first_word], words[first_word + 1], words[first_word + 2]
        first, last = units * index // threads, units * (index + 1) // threads
        for i in range(first * unit, last * unit):
            status = call_task(function, job, i, worker)
            if status != 0:
                return status
        return 0

    return share


class StaticOurs(Ours):
    """``Ours`` on static shares. A thread that is done early only waits at the barrier."""

    def __init__(self, weights: RandomLayers, kernel: str) -> None:
        super().__init__(weights, kernel)
        self._pool = self.layers[0].pool
        compiled = make_kernel(self.layers[0].backend.name, weights.fmt)
        self._stages = compiled.stages
        self._compiled, self._packed = compiled, [packed.slices[0] for packed in weights.packed]
        self._workspace, self._shares = MoEWorkspace(), np.zeros(1, SHARES)

    def prepare(self, T: int, ids: list[torch.Tensor]) -> None:
        """Prepares as ``Ours`` does; every thread has as many down tasks, all alike."""
        threads, gemm_from = self._pool.threads, self.layers[0].gemm_from
        moe_plan = plan(self.layers[0].shape, self._packed[0].fmt, threads, T, gemm_from)
        share = -(-self._packed[0].down.shape[1] // threads)
        parts = -(-share // moe_plan.h_chunk)
        moe_plan = replace(moe_plan, h_chunk=-(-share // parts), h_share=0)
        self._calls = [
            MoECall(packed, self._compiled, self._workspace, threads, moe_plan)
            for packed in self._packed
        ]
        super().prepare(T, ids)

    def run(self, layer: int, routing: int) -> torch.Tensor:
        """One call; its [T, H] result."""
        call, ids = self._calls[layer], self.ids[routing]
        y, threads, stages = torch.empty(self.x.shape), self._pool.threads, self._stages
        held = take_serially(call, self.x, ids, self.weights, y)
        tasks = call.tasks
        # A run of outputs sums its experts in order: it stays with one thread.
        self._shares[0] = (
            *(call.address, threads),
            *(stages.pack.address, tasks.pack, 1),
            *(stages.gate_up.address, tasks.gate_up, 1),
            *(stages.down.address, tasks.down_chunks, tasks.active),
        )
        record = self._shares.ctypes.data
        shares = [
            Job(stage, make_share(stage).address, record, tasks=threads, after=min(i, 1))
            for i, stage in enumerate(_STAGES)
        ]
        self._pool.run(Jobs(shares))
        del held
        return y.to(self.x.dtype)
