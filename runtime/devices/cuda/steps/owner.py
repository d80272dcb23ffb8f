"""What the steps of a runner on GPUs have in common with it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ....planning.placement import Placement
from ....program import Program
from ....program.sizes import ONE_TOKEN, StepSizes
from ....program.weights import WeightStore
from ....runner.paged_runner import LastStep, Lowerable
from ....runner.slots import Slots
from ....workers.pool import WorkerPool
from ...gpus import Gpus


class Owner(Protocol):
    """A ``CudaRunner``, as its steps see it: through a weak reference, since it has them, so that
    its memory is freed at once when nobody has it any more."""

    model: Lowerable
    weights: WeightStore
    caches: dict[str, torch.Tensor]
    pool: WorkerPool
    kernel: str
    gpus: Gpus
    device: torch.device
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_logits: int
    max_num_batched_tokens: int
    deferred: int
    placement: Placement
    last_step: LastStep | None
    slots: Slots | None

    @property
    def real(self) -> bool:
        """Whether there is a GPU, and not Triton's interpreter."""

    def lowered(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The model's program of these sizes, placed."""

    def lowered_streamed(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The same without slots whose experts change."""

    def watched(self) -> AbstractContextManager[None]:
        """Within it what a GPU fails with says that the device is lost."""

    def enough_memory(self) -> AbstractContextManager[None]:
        """Within it too little memory is an error that says how to ask for less."""
