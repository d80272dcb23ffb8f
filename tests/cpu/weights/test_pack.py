"""Packing on the workers writes the bytes of the reference packing, scales included."""

from __future__ import annotations

import pytest
import torch

from pykernels.quant import PackedExperts, Weight, get_format
from pykernels.quant.gguf import GGUF
from pykernels.quant.layout import ceil_to
from pykernels.shapes import MoEShape
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..kernels import formats

SIZES = [
    pytest.param(32, 128, id="one block"),
    pytest.param(1, 1, id="all padding"),
    pytest.param(33, 127, id="odd K: no pairs can be moved, a ragged four"),
    pytest.param(100, 130, id="even K, a ragged last step"),
    pytest.param(256, 640, id="several blocks, scale groups and chunks"),
]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(1) as pool:
        yield pool


def _random(name: str, N: int, K: int) -> Weight:
    """A matrix with every code; GGUF's rows are random bytes, so their scales are any bits."""
    fmt = get_format(name)
    if not isinstance(fmt, GGUF):
        return fmt.quantize(torch.randn(N, K) * 2.0 ** torch.randint(-9, 9, (N, 1)))
    data = torch.randint(0, 256, fmt.data_shape(N, K), dtype=torch.uint8)
    return Weight(torch.where(data == 128, 129, data) if name == "q8_0" else data)  # no -128


@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("name", formats())
def test_workers_pack_the_reference_bytes(pool, name, N, K):
    fmt = get_format(name)
    H, I = ceil_to(K, fmt.k_multiple), ceil_to(N, fmt.k_multiple)  # noqa: E741
    shape = MoEShape(E=2, H=H, I=I, topk=1)
    gate, up, down = (_random(name, *s) for s in ((I, H), (I, H), (H, I)))
    fast = PackedExperts(shape, fmt, packer=packer(pool))
    slow = PackedExperts(shape, fmt)
    for section in (fast.gate_up, fast.gate_up_scale, fast.down, fast.down_scale):
        section.fill_(0xAB)  # every byte must be written, padding included
    for experts in (fast, slow):
        experts.pack(1, gate, up, down)
    for section in ("gate_up", "gate_up_scale", "down", "down_scale"):
        seen, expected = (getattr(experts, section)[1] for experts in (fast, slow))
        assert torch.equal(seen, expected), section


def test_mxfp4_scales_keep_the_smallest_power(pool):
    """E8M0 0 is 2**-127: subnormal in bfloat16, where the other exponents are not."""
    fmt = get_format("mxfp4")
    scale = torch.arange(255, dtype=torch.uint8).repeat(32, 1)
    weight = Weight(torch.ones(32, 255 * 32, dtype=torch.uint8), scale)
    blocks, scales, want = (
        torch.empty(1, n, dtype=torch.uint8)
        for n in (fmt.block_bytes(8160), fmt.scale_bytes(8160), fmt.scale_bytes(8160))
    )
    packer(pool)(fmt, weight, blocks, scales)
    fmt.pack_scales(scale, want)
    assert torch.equal(scales, want)
    assert torch.equal(fmt.unpack(blocks, scales, 32, 8160).scale, scale)


def test_transposed_weights_are_packed_by_value(pool):
    fmt, shape = get_format("int8"), MoEShape(E=1, H=64, I=32, topk=1)
    gate, up, down = (fmt.quantize(torch.randn(*s)) for s in ((32, 64), (32, 64), (64, 32)))
    strided = Weight(gate.data.T.contiguous().T, gate.scale.T.contiguous().T)
    experts = PackedExperts(shape, fmt, packer=packer(pool))
    experts.pack(0, strided, up, down)
    back = experts.unpack(0)[0]
    assert torch.equal(back.data, gate.data) and torch.equal(back.scale, gate.scale)
