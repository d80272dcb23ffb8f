"""Embeddings from a table in any weight format: only rows that are looked up are dequantized."""

from __future__ import annotations

import pytest
import torch

from pykernels.quant import PackedMatrix, get_format
from runtime.devices.cpu.step import CpuExecutable
from runtime.program import Builder
from runtime.program.weights import WeightStore
from runtime.workers.matrix import packer
from runtime.workers.worker_pool import WorkerPool

from .kernels import formats


@pytest.mark.parametrize("name", formats())
def test_rows_of_a_packed_table(name: str) -> None:
    fmt, V, H = get_format(name), 70, 512
    weight = fmt.quantize(torch.randn(V, H, generator=torch.Generator().manual_seed(1)))
    ids = torch.tensor([69, 0, 31, 32, 40])
    b = Builder("embed", {"T": len(ids), "S": 1, "R": 1})
    b.buffer("tokens", "T", dtype=torch.int64, kind="input")
    b.buffer("rows", "T", H, kind="output")
    with WorkerPool(2) as pool:
        store = WeightStore()
        table = store.add("table", PackedMatrix.of(fmt, [weight], packer(pool)))
        b.node("embed", "embed", {"ids": "tokens"}, {"out": "rows"}, {"table": table})
        step = CpuExecutable(b.build(), store, pool, {"tokens": ids}, {})
        step.sizes[:] = torch.tensor([len(ids), 1, 1])
        step.run()
        assert torch.equal(step.outputs["rows"], fmt.dequantize(weight).float()[ids])
