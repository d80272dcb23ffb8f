"""Two planes of B tiles hold each weight exactly: every code times every small scale."""

from __future__ import annotations

import pytest
import torch

from pykernels.cpu.decode import TABLES, make_reader
from pykernels.cpu.instructions import instructions
from pykernels.cpu.jit import routine
from pykernels.cpu.planes import make_decode_planes
from pykernels.quant import Weight, get_format
from pykernels.quant.gguf import GGUF, Blocks
from pykernels.target import detect
from pykernels.testing import poisoned

K = 256


@pytest.mark.skipif(
    bool(detect().lacks(("avx512f", "avx512bw"))), reason="planes are decoded by AVX-512"
)
def test_the_planes_of_q6_k_add_up_to_its_weights():
    fmt = get_format("q6_k")
    assert isinstance(fmt, GGUF)
    decode = make_decode_planes(make_reader(fmt.name, instructions(detect())), False)

    @routine(4, "q6_k")
    def decode_block(w, tables, b_slab, scale):
        decode(w, K, tables, b_slab, scale, 0)
        return 0

    small = (torch.arange(512) // 2 - 128).view(32, 16)  # of 32 outputs by 16 groups
    for half in range(2):
        group = torch.arange(16) + 16 * (torch.arange(16)[:, None] % 2) + 32 * half
        codes = group.flatten().to(torch.uint8).repeat(32, 1)
        raw = fmt.join(
            Blocks(codes, torch.ones(32, 1).half(), small.to(torch.int8).view(torch.uint8))
        )
        w = torch.empty(1, fmt.block_bytes(K), dtype=torch.uint8)
        scale = torch.empty(1, fmt.scale_bytes(K), dtype=torch.uint8)
        fmt.pack(Weight(raw), w, scale)
        tiles = poisoned(2, 32, K, dtype=torch.bfloat16)
        addresses = (w.data_ptr(), TABLES.data_ptr(), tiles.data_ptr(), scale.data_ptr())
        decode_block.ctypes(*addresses)
        # [step][plane][half][four][even or odd][output][two inputs]
        planes = tiles.view(8, 2, 2, 8, 2, 16, 2).permute(1, 2, 5, 0, 3, 6, 4).reshape(2, 32, K)
        expected = small.repeat_interleave(16, dim=1) * (codes.int() - 32)
        assert torch.equal(planes.float().sum(0), expected.float())
