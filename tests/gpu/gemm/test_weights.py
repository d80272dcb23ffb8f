"""The stacks of weights that the GPU's kernels read: packed and unpacked, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import Matrices, empty_for_gpu, pack_for_gpu, unpack_from_gpu
from pykernels.quant import Weight, get_format

from .test_linear import made

FORMATS = ("bf16", "fp8", "int8", "int8-channel", "int4", "int4-g128", "mxfp4", "q4_k", "q6_k")


@pytest.mark.parametrize("name", FORMATS)
def test_packing_loses_nothing(name: str, device: torch.device) -> None:
    fmt, (N, K) = get_format(name), (136, 512)
    weight = fmt.quantize(torch.randn(N, K))
    stack = pack_for_gpu(fmt, [weight, weight])
    again = unpack_from_gpu(fmt, stack, 1)
    assert torch.equal(weight.data.view(torch.uint8), again.data.view(torch.uint8))
    if weight.scale is not None:
        assert again.scale is not None and torch.equal(weight.scale, again.scale)
    empty = empty_for_gpu(fmt, 2, N, K, device)
    assert (empty.N, empty.K, empty.group) == (N, K, stack.group)
    for mine, theirs in ((empty.data, stack.data), (empty.scale, stack.scale)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def test_a_matrix_without_a_layout_is_refused() -> None:
    with pytest.raises(PykernelsError, match="multiples of 64"):
        pack_for_gpu(get_format("int4"), [get_format("int4").quantize(torch.randn(8, 96))])
    with pytest.raises(PykernelsError, match="not 0"):
        empty_for_gpu(get_format("bf16"), 1, 8, 0, torch.device("cpu"))
    eight = get_format("int8")
    two = eight.quantize(torch.randn(8, 256))
    with pytest.raises(PykernelsError, match="scales"):
        pack_for_gpu(eight, [Weight(two.data, torch.ones(8, 1).bfloat16())])


def test_a_matrix_that_kernels_cannot_read_is_refused(device: torch.device) -> None:
    stack = made("int8", 8, 64)[1].to(device)
    buffer = torch.zeros(8 * 64 + 1, dtype=torch.int8, device=device)
    with pytest.raises(PykernelsError, match="begins within a word"):
        replace(stack, data=buffer[1:].view(1, 8, 64))
    with pytest.raises(PykernelsError, match="has gaps"):
        replace(stack, data=stack.data.new_zeros(1, 8, 128)[..., ::2])
    with pytest.raises(PykernelsError, match="has gaps"):
        Matrices("bf16", 8, 64, 0, torch.zeros(1, 64, 8, device=device).bfloat16().mT)
    with pytest.raises(PykernelsError, match=r"data is \(1, 8, 64\)"):
        replace(stack, N=9)
    odd = buffer.bfloat16()[1:].view(1, 8, 64)  # elements of two bytes are read one by one
    assert Matrices("bf16", 8, 64, 0, odd).nbytes == 1024
