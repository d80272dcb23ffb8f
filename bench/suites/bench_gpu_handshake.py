"""A hop from the GPU to the CPU and back, as ``python -m bench.handshake`` times it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from bench.cases import truth  # noqa: E402
from bench.handshake import HOPS, Hops  # noqa: E402
from bench.suites import gpu  # noqa: E402
from pykernels.gpu.common import stream_memory  # noqa: E402

HIDDEN, TOPK = 7168, 8
pytestmark = pytest.mark.benchmark(timer=gpu.CLOCK)


@pytest.mark.parametrize("hop", HOPS.values(), ids=[name.replace(", ", "+") for name in HOPS])
def bench_gpu_handshake(benchmark: Any, hop: Any, device: torch.device) -> None:
    """A layer's rows to the CPU and its sums back, without experts: one of 60 hops of a graph."""
    reason = "a hop needs a GPU" if device.type == "cpu" else stream_memory.supports()
    if reason:
        pytest.skip(reason)
    layer = hop.layer(HIDDEN, TOPK)
    error = layer.error()
    assert error < truth.MOST, f"it is wrong: relative error {error:.2g} beside pykernels.ref"
    hops = Hops(60, 100)
    gpu.CLOCK.tell(benchmark, hops.time(hop.body(hops, layer), hop.asks))
    benchmark.extra_info.update(gpu=gpu.name(device), error=error)
