"""What this GPU can do at most: read, copy, multiply bf16; measured in the same run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from .timer import make_timer


@dataclass(frozen=True)
class Roofs:
    """Rates of 1e9 bytes and 1e12 operations.

    Attributes:
        read_gbps: a kernel that reads 2 GiB and keeps one sum a CTA.
        copy_gbps: a device copy of 1 GiB, bytes read plus bytes written.
        matmul_tflops: torch's bf16 product of two random 8192 x 8192 matrices.
    """

    read_gbps: float
    copy_gbps: float
    matmul_tflops: float

    def compute(self, what: str) -> float:
        """TFLOP/s of "bf16" products, or of "fp8": twice that."""
        return self.matmul_tflops * (2 if what == "fp8" else 1)


@functools.cache
def measure_roofs(device: torch.device) -> Roofs:
    """Medians of a few dozen runs each; on a CPU (for the tests) of small sizes."""
    from pykernels.gpu.common.bandwidth import read

    cuda = device.type == "cuda"
    words, N = (1 << 29, 8192) if cuda else (1 << 18, 256)
    timer, seconds = make_timer(device), 0.15 if cuda else 0.01

    def timed(call: Callable[[], object]) -> float:
        ready = timer.prepare(call, 1, seconds)
        return median(ready() for _ in range(ready.rounds))

    data = torch.randint(-9, 9, (words,), dtype=torch.int32, device=device)  # 2 GiB
    reading = timed(functools.partial(read, data))
    half = words // 2
    copying = timed(functools.partial(data[:half].copy_, data[half:]))
    del data
    A, B = (torch.randn(N, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiplying = timed(functools.partial(torch.mm, A, B))
    return Roofs(
        read_gbps=round(4 * words / reading / 1e9, 5),  # interpreted on a busy CPU: MB/s
        copy_gbps=round(4 * words / copying / 1e9, 2),
        matmul_tflops=round(2 * N**3 / multiplying / 1e12, 3),
    )
