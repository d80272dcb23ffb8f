"""What the steps of a runner on GPUs have in common with it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ....planning.compile import Compiled
from ....planning.execution import ExecutionPlan, Phase
from ....planning.lowerable import Lowerable
from ....program.weights import WeightStore
from ....runner.paged_runner import LastStep
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
    plan: ExecutionPlan
    max_num_logits: int
    max_num_batched_tokens: int
    last_step: LastStep | None
    slots: Slots | None

    @property
    def real(self) -> bool:
        """Whether there is a GPU, and not Triton's interpreter."""

    def compiled(self, phase: Phase = Phase.PROMPT, tokens: int = 1, share: float = 0) -> Compiled:
        """See ``planning.compile``."""

    def watched(self) -> AbstractContextManager[None]:
        """Within it what a GPU fails with says that the device is lost."""

    def enough_memory(self) -> AbstractContextManager[None]:
        """Within it too little memory is an error that says how to ask for less."""
