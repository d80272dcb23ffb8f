"""Packing on the workers writes the bytes of the reference packing."""

from __future__ import annotations

import pytest
import torch

from pykernels.quant import get_format
from pykernels.quant.layout import pack_tiles, padded
from pykernels.shapes import MoEShape
from runtime.experts import RoutedExperts
from runtime.pool import WorkerPool

SIZES = [
    pytest.param(32, 128, id="one block"),
    pytest.param(1, 1, id="all padding"),
    pytest.param(33, 127, id="odd K: no pairs can be moved"),
    pytest.param(100, 130, id="even K, a ragged last step"),
    pytest.param(256, 640, id="several blocks and scale groups"),
]


@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_workers_pack_the_reference_bytes(name, N, K):
    fmt = get_format(name)
    gate, up = (fmt.quantize(torch.randn(N, K)) for _ in range(2))
    down = fmt.quantize(torch.randn(K, N))
    with WorkerPool(1) as pool:
        experts = RoutedExperts(MoEShape(E=2, H=K, I=N, topk=1), name, pool)
        experts.weights.gate_up.fill_(0xAB)  # every byte must be written, padding included
        experts.load_expert(1, gate, up, down)
    for blocks, weight in (
        (experts.weights.gate_up[1, :, 0], gate),
        (experts.weights.gate_up[1, :, 1], up),
        (experts.weights.down[1], down),
    ):
        expected = torch.empty(
            padded(*weight.data.shape)[0] // 32, blocks.shape[1], dtype=torch.uint8
        )
        pack_tiles(weight.data, expected)
        assert torch.equal(blocks, expected)


def test_transposed_weights_are_packed_by_value():
    fmt, shape = get_format("bf16"), MoEShape(E=1, H=64, I=32, topk=1)
    gate, up = (fmt.quantize(torch.randn(64, 32).T) for _ in range(2))
    with WorkerPool(1) as pool:
        experts = RoutedExperts(shape, "bf16", pool)
        experts.load_expert(0, gate, up, fmt.quantize(torch.randn(64, 32)))
    assert torch.equal(experts.weights.unpack(0)[0].data, gate.data)
