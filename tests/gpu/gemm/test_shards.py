"""A rank's shard of a matrix in the GPU's layout has the numbers of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pykernels.gpu.gemm.weights import unpack_from_gpu
from pykernels.quant import FORMATS, get_format
from runtime.devices.cuda.memory.weights import gpu_format, matrix
from runtime.program.weight_shard import matrix_shards, shard_of
from runtime.program.weight_spec import RowRange, WeightSpec

K = 1024
SHARDS: tuple[tuple[list[RowRange], tuple[int, int]], ...] = (
    ([RowRange(0, 128), RowRange(256, 320, 128)], (0, K)),  # some rows of both parts
    ([RowRange(0, 256), RowRange(256, 384, 256)], (256, 768)),  # some columns of all
    ([RowRange(144, 160), RowRange(300, 304, 32)], (0, K)),  # with a gap between
)


@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_has_the_numbers_of_the_whole(name: str) -> None:
    fmt, generator, cpu = get_format(name), torch.Generator().manual_seed(0), torch.device("cpu")
    parts = [fmt.quantize(torch.randn(N, K, generator=generator) / 8) for N in (256, 128)]
    whole = torch.cat([fmt.dequantize(part) for part in parts])
    spec = WeightSpec.matrix("w", name, [("a", 256, K), ("b", 128, K)])
    for ranges, columns in SHARDS:
        shard = shard_of(spec, ranges, None if columns == (0, K) else columns)
        store: Any = SimpleNamespace(matrices=lambda own: matrix_shards(own, parts))
        stored = gpu_format(fmt, shard.shape[1])
        found = torch.zeros(shard.shape)
        for rows in matrix(shard, store, cpu):
            values = stored.dequantize(unpack_from_gpu(stored, rows.matrix, 0)).float()
            found[rows.start : rows.start + rows.matrix.N] = values[: rows.matrix.N]
        wanted = torch.zeros(shard.shape)
        for run in ranges:
            own = whole[run.first : run.last, columns[0] : columns[1]]
            wanted[run.at : run.at + len(own)] = own if stored is fmt else own.bfloat16()
        assert torch.equal(found, wanted.float())
