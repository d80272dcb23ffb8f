"""B tiles with their scales in them: every code times every scale, exactly."""

from __future__ import annotations

import torch

from pykernels.cpu.gemm.dequant_slab import make_dequantize_planes, make_dequantize_powers
from pykernels.cpu.jit import routine
from pykernels.cpu.weights.dequant import make_reader
from pykernels.cpu.weights.lookup import TABLES
from pykernels.quant import Format, Weight, get_format
from pykernels.quant.gguf import GGUF, Blocks
from pykernels.quant.mxfp4 import VALUES
from pykernels.testing import poisoned

from ..kernels import needs_avx512, operations

pytestmark = needs_avx512
K = 256


def _slab(fmt: Format, weight: Weight, dequantize, planes: int) -> torch.Tensor:
    """bfloat16 [planes, 32, K] of a packed block."""

    @routine(4, fmt.name)
    def dequantize_block(w, tables, b_slab, scale):
        dequantize(w, K, tables, b_slab, scale, 0)
        return 0

    w = torch.empty(1, fmt.block_bytes(K), dtype=torch.uint8)
    scale = torch.empty(1, fmt.scale_bytes(K), dtype=torch.uint8)
    fmt.pack(weight, w, scale)
    tiles = poisoned(K // 32, planes, 2, 8, 2, 16, 2, dtype=torch.bfloat16)
    dequantize_block.ctypes(w.data_ptr(), TABLES.data_ptr(), tiles.data_ptr(), scale.data_ptr())
    # [step][plane][half][four][even or odd][output][two inputs]
    return tiles.permute(1, 2, 5, 0, 3, 6, 4).reshape(planes, 32, K)


def test_the_planes_of_q6_k_add_up_to_its_weights():
    fmt = get_format("q6_k")
    assert isinstance(fmt, GGUF)
    dequantize = make_dequantize_planes(make_reader(fmt.name, operations()), False)
    small = (torch.arange(512) // 2 - 128).view(32, 16)  # of 32 outputs by 16 groups
    for half in range(2):
        group = torch.arange(16) + 16 * (torch.arange(16)[:, None] % 2) + 32 * half
        codes = group.flatten().to(torch.uint8).repeat(32, 1)
        ones, bytes_ = torch.ones(32, 1).half(), small.to(torch.int8).view(torch.uint8)
        planes = _slab(fmt, Weight(fmt.join(Blocks(codes, ones, bytes_))), dequantize, 2)
        expected = small.repeat_interleave(16, dim=1) * (codes.int() - 32)
        assert torch.equal(planes.float().sum(0), expected.float())


def test_mxfp4_takes_its_powers():
    fmt = get_format("mxfp4")
    dequantize = make_dequantize_powers(make_reader(fmt.name, operations()))
    powers = torch.arange(256).clamp(max=254).view(32, 8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(32, K // 16)
    found = _slab(fmt, Weight(codes, powers.to(torch.uint8)), dequantize, 1)[0]
    near = (powers - 127).clamp(-125, 125).repeat_interleave(32, dim=1)
    assert torch.equal(found.float(), torch.ldexp(VALUES[codes.long()], near))
