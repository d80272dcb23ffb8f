"""Memory for weights: huge pages, zeroed, page-aligned.

A stream of packed weights on 4 KiB pages misses the TLB every 64 lines; on 2 MiB pages it runs at
the
read roof. Transparent huge pages are asked for with ``madvise``; where they are off, the memory is
plain, and ``pykernels doctor`` says so.
"""

from __future__ import annotations

import mmap

import torch

from pykernels.env import env
from pykernels.errors import PykernelsError

HUGE_PAGE = 2 << 20


def allocate(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of zeros on huge pages, its address a multiple of 2 MiB.

    The memory goes back when the tensor and its views are gone.

    Raises:
        PykernelsError: the system refuses that much address space.
    """
    try:
        region = mmap.mmap(-1, nbytes + HUGE_PAGE)
    except (OSError, ValueError, OverflowError):
        raise PykernelsError(
            f"the system refuses {nbytes / 2**30:.1f} GiB for weights",
            "Free memory, raise the limit (ulimit -v), or take a smaller model or format",
        ) from None
    if env.hugepages:
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE
    return whole[skip : skip + nbytes]
