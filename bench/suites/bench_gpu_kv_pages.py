"""Pages of keys and values from pinned main memory to the GPU, against the link's own rate."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from bench.suites import gpu  # noqa: E402
from pykernels.gpu.kv_pages import list_pages, load_pages  # noqa: E402
from runtime.devices.cuda.link import link_rate  # noqa: E402

PAGE, KVH, D, CONTEXT = 64, 4, 128, 32768
ROUNDS = 10
pytestmark = pytest.mark.benchmark(timer=gpu.CLOCK)


@pytest.mark.parametrize("programs", [16, 32, 64, 132, 528])
def bench_gpu_kv_pages(benchmark: Any, programs: int, device: torch.device) -> None:
    """A layer's keys and values of Qwen3's shape at a context of 32,768, in pages at random; by the
    programs that bring them."""
    if device.type == "cpu":
        pytest.skip("the link needs a GPU")
    pages = CONTEXT // PAGE
    shape = 2 * pages, PAGE, KVH, D
    caches = [torch.randn(shape).to(torch.bfloat16).pin_memory() for _ in "kv"]
    staging = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in "kv"]
    table = torch.randperm(2 * pages)[:pages].view(1, -1).to(torch.int32).to(device)
    lengths = torch.tensor([CONTEXT], dtype=torch.int32, device=device)
    listed = torch.zeros(1 + 2 * pages, dtype=torch.int32, device=device)
    list_pages(table, lengths, listed, PAGE)
    seconds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        load_pages(listed, caches, staging, programs)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    chosen = table[0].long().cpu()
    for cache, there in zip(caches, staging, strict=True):
        assert torch.equal(there[chosen.to(device)].cpu(), cache[chosen])
    best = median(seconds[1:])
    gpu.CLOCK.tell(benchmark, seconds[1:])
    gbps, roof = 2 * CONTEXT * KVH * D * 2 / best / 1e9, link_rate(device) / 1e9
    benchmark.extra_info.update(
        gpu=gpu.name(device), gbps=gbps, roof_gbps=roof, roof_share=gbps / roof, error=0.0
    )
