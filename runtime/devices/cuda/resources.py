"""What the steps of a runner on GPUs share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.stream_memory import supports as why_no_flags

from ...kv_cache.layout import PAGE
from ...machine.pinned import Pinned
from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan
from ...planning.gpu.capacity import on_gpus
from ...planning.lowerable import Lowerable
from ...planning.placement import CPU
from ...program import Program
from ...program.sizes import StepSizes
from ...program.weights import LayoutOf
from ...runner.batch import DeviceLost
from ...runner.paged_runner import LastStep
from ...workers.pool import WorkerPool
from ...workers.threads import spin_budget
from ..gpus import Gpus, check_device, free_bytes, gpus_of, interpreted, limit
from .binders.attention import check_heads
from .memory.buffers import allocated_caches
from .memory.pinning import pin_caches, pin_dense
from .step.peers import Peers


@dataclass(frozen=True)
class CudaResources:
    """What a ``CudaRunner`` gives to those who make and run its steps. Nothing of it leads back to
    the runner, so that its memory is freed at once when nobody has the runner any more.

    Attributes:
        gpus: by their names in programs; ``sampler``: the one that samples.
        pool: runs what is on the CPU, by the kernels ``kernel``.
        sizes: of the largest step, and of the cache.
        caches: by buffer, on the GPUs; there before the first step is made.
        last_steps: the step that ended last, whoever ran it.
        pinned: what crosses from main memory.
        gpu_gib: of the plan.
        peers: which GPUs reach each other's memory.
    """

    model: Lowerable
    gpus: Gpus
    sampler: str
    pool: WorkerPool
    kernel: str
    sizes: StepSizes
    caches: dict[str, torch.Tensor]
    last_steps: deque[LastStep]
    pinned: Pinned
    gpu_gib: float | None = None
    peers: Peers = Peers()

    @classmethod
    def open(
        cls, model: Lowerable, plan: ExecutionPlan, device: str, pool: WorkerPool
    ) -> CudaResources:
        """Those of the GPUs that ``device`` names; nothing is allocated yet.

        Args:
            device: "cuda:N", or several of them, "cuda:0,cuda:1", in the order in which they have
                layers; "cpu" in Triton's interpreter (``gpus_of``).
            pool: runs what is on the CPU: experts.

        Raises:
            PykernelsError: no such GPU, a kernel that cannot run there, or a driver that lets it
                not wait for the CPU.
        """
        check_device(device)
        check_heads(model.lower())
        gpus = gpus_of(device)
        uses_cpu = CPU in (plan.placement.experts, plan.kv_attention) or plan.measures_kv
        check_waits(gpus, pool if uses_cpu else None)
        limit(gpus, plan.gpu_gib)
        own = model, gpus, plan.placement.last, pool, plan.kernel, plan.sizes
        return cls(*own, {}, deque(maxlen=1), Pinned(), plan.gpu_gib, Peers.of(gpus))

    def over(self, gpus: Sequence[str]) -> CudaResources:
        """What steps on these GPUs alone share, of which the first one samples."""
        here = {gpu: self.gpus[gpu] for gpu in gpus}
        return replace(self, gpus=here, sampler=gpus[0])

    def allocate(self, compiled: Compiled, layouts: Callable[[Program], LayoutOf]) -> None:
        """Allocates the caches that are not there, pins dense weights that cross in each step.

        Args:
            compiled: a step of any size; ``layouts``: of a part's weights.

        Raises:
            PykernelsError: they cannot be pinned.
        """
        if self.real:  # a layer of the GPU is shorter than waking a sleeper
            self.pool.spin_for(spin_budget(driver_works=False))
            for part in on_gpus(compiled.parts).values():
                pin_dense(part, self.model.store, layouts(part), self.pinned)
        self.allocate_caches(compiled)

    def allocate_caches(self, compiled: Compiled) -> None:
        """Allocates those caches of a step that are not there, and pins those in main memory.

        Raises:
            PykernelsError: they cannot be pinned.
        """
        missing = allocated_caches(
            compiled.program, self.gpus, self.caches, self.pool.memory.allocate
        )
        if self.real:
            pin_caches(missing, self.pinned)
        self.caches.update(missing)

    @property
    def device(self) -> torch.device:
        """The GPU that samples."""
        return self.gpus[self.sampler]

    @property
    def real(self) -> bool:
        """Whether there is a GPU, and not Triton's interpreter."""
        return not interpreted(self.gpus)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it what a GPU fails with says that the device is lost."""
        try:
            with torch.inference_mode():  # in which the model may have been loaded
                yield
        except torch.AcceleratorError as error:  # no later call on this device works either
            raise DeviceLost(
                f"{', '.join(self.gpus)} failed: {str(error).splitlines()[0]}",
                "Load the model again",
            ) from error

    @contextmanager
    def enough_memory(self) -> Iterator[None]:
        """Within it too little memory is an error that says how to ask for less."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            there = free_bytes(self.gpus, self.gpu_gib).items()
            free = ", ".join(f"{n >> 20} MiB of {gpu}" for gpu, n in there)
            raise PykernelsError(
                f"too little GPU memory: {free} are free, the weights there, a KV cache of"
                f" {self.sizes.pages * PAGE} tokens and steps of"
                f" {self.sizes.tokens} need more",
                "Keep the experts on the CPU (experts cpu), or ask for fewer kv_tokens or"
                " max_num_batched_tokens, or for a smaller kv_gpu_gib",
            ) from error


def check_waits(gpus: Gpus, pool: WorkerPool | None) -> None:
    """Raises PykernelsError if a GPU cannot wait for another device, as its programs have to.

    Args:
        pool: runs experts; None: all are on GPUs.
    """
    if interpreted(gpus):
        return
    if (pool is not None or len(gpus) > 1) and (reason := why_no_flags()):
        raise PykernelsError(
            f"{','.join(gpus)} cannot wait for another device: {reason}",
            "Update the NVIDIA driver, or keep all on one GPU (experts gpu)",
        )
    if pool is not None and pool.threads == 1 and pool.driver_works:
        # The driver loads a kernel when all that was launched before has run; some of it may
        # wait for this worker.
        raise PykernelsError(
            "the only worker of the experts is the thread that launches the GPU's kernels",
            "Take 2 threads or more, or keep the experts on the GPU (experts gpu)",
        )
