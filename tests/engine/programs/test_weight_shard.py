"""Shards of weights in every format, against the same rows and columns of the whole in float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, Biases, get_format
from pykernels.shapes import ExpertSpec, MoEShape
from runtime.program.weight_shard import expert_shards, matrix_shards, shard_of, tensor_shard
from runtime.program.weight_spec import RowRange, WeightSpec

K = 1024
SHARDS: tuple[tuple[list[RowRange], tuple[int, int] | None], ...] = (
    ([RowRange(0, 128), RowRange(256, 320, 128)], None),  # some rows of both parts
    ([RowRange(0, 256), RowRange(256, 384, 256)], (256, 768)),  # some columns of all
    ([RowRange(144, 160), RowRange(300, 304, 32)], (768, K)),  # rows of one block of scales
)


@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_has_the_numbers_of_the_whole(name: str) -> None:
    fmt, generator = get_format(name), torch.Generator().manual_seed(0)
    parts = [fmt.quantize(torch.randn(N, K, generator=generator) / 8) for N in (256, 128)]
    whole = torch.cat([fmt.dequantize(part) for part in parts])
    spec = WeightSpec.matrix("w", name, [("a", 256, K), ("b", 128, K)])
    for ranges, columns in SHARDS:
        shard, at = shard_of(spec, ranges, columns), slice(*(columns or (0, K)))
        found = list(matrix_shards(shard, parts))
        for weight, part, run in zip(found, shard.parts, ranges, strict=True):
            fmt.check(weight, *part.shape)
            wanted = whole[run.first : run.last, at]
            assert torch.equal(fmt.dequantize(weight), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_an_expert_add_up_to_it(name: str) -> None:
    H, I = 256, 1024  # noqa: E741
    fmt, generator = get_format(name), torch.Generator().manual_seed(0)
    sizes = (I, H), (I, H), (H, I)
    gate, up, down = (fmt.quantize(torch.randn(*size, generator=generator) / 16) for size in sizes)
    biases = Biases(*(torch.randn(N, generator=generator) for N in (I, I, H)))
    moe = MoEShape(E=1, H=H, I=I, topk=1, spec=ExpertSpec(bias=True))
    spec = WeightSpec.experts("mlp", moe, name, name)
    x = torch.randn(3, H, generator=generator)
    total = torch.zeros(3, H)
    for first, last in ((0, 256), (256, 1024)):
        shard = shard_of(spec, [RowRange(first, last)])
        [(matrices, bias)] = expert_shards(shard, [((gate, up, down), biases)])
        g, u, d = (fmt.dequantize(weight) for weight in matrices)
        assert bias is not None and shard.moe is not None and shard.moe.I == len(g)
        total += (silu(linear(x, g, bias.gate)) * linear(x, u, bias.up)) @ d.T + bias.down
    g, u, d = (fmt.dequantize(weight) for weight in (gate, up, down))
    wanted = (silu(linear(x, g, biases.gate)) * linear(x, u, biases.up)) @ d.T + biases.down
    torch.testing.assert_close(total, wanted)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fp8", "rows 64 to 192 of w cut through a block of 128 in fp8"),
        ("int4", "inputs 48 to 1024 of w cut through a block of 32 in int4"),
        ("q4_k", "inputs 48 to 1024 of w cut through a block of 256 in q4_k"),
    ],
)
def test_no_cut_through_a_block(name: str, cause: str) -> None:
    spec = WeightSpec.matrix("w", name, [("w", 256, K)])
    rows, columns = (
        ([RowRange(64, 192)], None) if "rows" in cause else ([RowRange(0, 256)], (48, K))
    )
    with pytest.raises(PykernelsError, match=cause):
        shard_of(spec, rows, columns)


def test_a_shard_of_a_bias_has_zeros_between_its_pieces() -> None:
    shard = shard_of(WeightSpec.tensor("b", 96), [RowRange(8, 12), RowRange(64, 68, 32)])
    numbers = torch.arange(96.0)
    wanted = [*range(8, 12), *[0] * 28, *range(64, 68)]
    assert tensor_shard(shard, numbers).tolist() == wanted
