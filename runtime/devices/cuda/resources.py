"""What the steps of a runner on GPUs share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.stream_memory import supports as why_no_flags

from ...kv_cache.layout import PAGE
from ...planning.lowerable import Lowerable
from ...program.sizes import StepSizes
from ...runner.batch import DeviceLost
from ...runner.paged_runner import LastStep
from ...workers.pool import WorkerPool
from ..gpus import Gpus, free_bytes, interpreted


@dataclass(frozen=True)
class CudaResources:
    """What a ``CudaRunner`` gives to those who make and run its steps. Nothing of it leads back to
    the runner, so that its memory is freed at once when nobody has the runner any more.

    Attributes:
        gpus: by their names in programs.
        pool: runs what is on the CPU, by the kernels ``kernel``.
        sizes: of the largest step, and of the cache.
        caches: by buffer, on the GPUs; there before the first step is made.
        last_steps: the step that ended last, whoever ran it.
    """

    model: Lowerable
    gpus: Gpus
    pool: WorkerPool
    kernel: str
    sizes: StepSizes
    caches: dict[str, torch.Tensor]
    last_steps: deque[LastStep]

    @property
    def device(self) -> torch.device:
        """The last GPU, which samples."""
        return list(self.gpus.values())[-1]

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
            free = ", ".join(f"{n >> 20} MiB of {gpu}" for gpu, n in free_bytes(self.gpus).items())
            raise PykernelsError(
                f"too little GPU memory: {free} are free, the weights there, a KV cache of"
                f" {self.sizes.pages * PAGE} tokens and steps of"
                f" {self.sizes.tokens} need more",
                "Keep the experts on the CPU (experts cpu), or ask for fewer kv_tokens or"
                " max_num_batched_tokens",
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
