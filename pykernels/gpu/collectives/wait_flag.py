"""A kernel that spins until a flag has its value.

``common.stream_memory.wait_value`` blocks the hardware queue in which the driver has put it. Queues
are few (8, unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says more), so what other streams have launched
may stand behind it, such as the copies that bring the next layer's experts: two GPUs then read
prompts as slowly as one (``bench/notes/several-gpus.md``). A kernel that spins holds up its own
stream alone; where nothing is copied beside, it would gain nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.launch import check_device, interpreted


@triton.jit
def _wait_flag(flag, value):
    seen = tl.load(flag, volatile=True)
    while seen != value:
        seen = tl.load(flag, volatile=True)


def wait_flag(flag: torch.Tensor, value: int) -> None:
    """The current stream goes on when the flag is ``value``. There is no limit of time, so whoever
    sets the flag needs a watchdog.

    Args:
        flag: int64 [1], on this GPU, on a peer of it, or pinned.

    Raises:
        PykernelsError: another dtype, memory that is not pinned, or no Triton for this device.
    """
    if flag.dtype != torch.int64 or flag.shape != (1,):
        raise PykernelsError(f"the flag is {flag.dtype} {tuple(flag.shape)}", "Give int64 [1]")
    if flag.device.type != "cpu" or interpreted():
        check_device(flag)
    elif not flag.is_pinned():
        raise PykernelsError("the flag is in memory that is not pinned", "Give pinned memory")
    _wait_flag[(1,)](flag, value, num_warps=1)
