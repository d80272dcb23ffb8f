"""Experts made on the GPU of the CPU's tiles, against those packed for it from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import Matrices
from pykernels.gpu.moe.experts import GpuExperts
from pykernels.gpu.moe.from_tiles import (
    ExpertTiles,
    copy_expert,
    copy_experts,
    section_bytes,
    supports,
    unpack_tiles,
)
from pykernels.quant import FORMATS, Biases, Format, PackedExperts, Weight, get_format
from pykernels.quant.experts import _pack, aligned_zeros
from pykernels.quant.gguf import GGUF, Blocks
from pykernels.quant.split import SplitExperts
from pykernels.shapes import ExpertSpec, MoEShape

ODD = MoEShape(E=3, H=72, I=40, topk=2)  # rows that fill no block, inputs that fill no tile
PARTS = MoEShape(E=2, H=320, I=64, topk=2)  # chunks, groups and scale blocks that are not whole
WHOLE = MoEShape(E=1, H=256, I=512, topk=1)  # for superblocks, two of them
SQUARE = MoEShape(E=1, H=256, I=256, topk=1)
WIDE = MoEShape(E=1, H=128, I=320, topk=1)  # for slices, the last one not whole
GPT_OSS = ExpertSpec(1.702, 7.0, 1.0, bias=True)
BIASED = replace(PARTS, spec=GPT_OSS)

Three = tuple[Weight, Weight, Weight]
Made = tuple[PackedExperts, list[Three], list[Biases]]


def random_weight(fmt: Format, N: int, K: int) -> Weight:
    """Any codes and scales of a K-quant, whose search would take long; else quantized numbers."""
    if not isinstance(fmt, GGUF) or not fmt.small:
        return fmt.quantize(torch.randn(N, K))
    count = N * K // fmt.k_multiple
    codes = torch.randint(1 << fmt.bits, (count, fmt.k_multiple), dtype=torch.uint8)
    small = torch.randint(256 if fmt.name == "q6_k" else 64, (count, fmt.small), dtype=torch.uint8)
    blocks = Blocks(codes, torch.randn(count, fmt.halves).half(), small)
    return Weight(fmt.join(blocks).view(fmt.data_shape(N, K)))


def as_format(to: str, fmt: Format, weight: Weight) -> Weight:
    """A weight as it is, or dequantized to bfloat16."""
    return weight if to == fmt.name else Weight(fmt.dequantize(weight).to(torch.bfloat16))


def made(shape: MoEShape, fmt: Format, down_fmt: Format | None = None) -> Made:
    """Packed for the CPU, and what was packed."""
    packed = PackedExperts(shape, fmt, down_fmt=down_fmt)
    weights, biases = [], []
    for e in range(shape.E):
        gate, up = (random_weight(fmt, shape.I, shape.H) for _ in range(2))
        down = random_weight(packed.down_fmt, shape.H, shape.I)
        weights.append((gate, up, down))
        if shape.spec.bias:
            sizes = (shape.I, shape.I, shape.H)
            biases.append(Biases(*(torch.randn(size) for size in sizes)))
        packed.pack(e, *weights[-1], biases=biases[-1] if biases else None)
    return packed, weights, biases


def expert_tiles(packed: PackedExperts, device: torch.device) -> ExpertTiles:
    """All of them on the device."""
    shape = packed.shape
    tiles = ExpertTiles.empty(shape, packed.fmt, packed.down_fmt, shape.E, device)
    copy_experts(packed, range(shape.E), tiles)
    return tiles


def empty_experts(fmt: Format, slots: int, shape: MoEShape, device: torch.device) -> GpuExperts:
    """Slots full of -1."""
    out = GpuExperts.empty(fmt, slots, shape.H, shape.I, device, shape.spec)
    for part in parts(out):
        part.view(torch.uint8).fill_(255)
    return out


def parts(experts: GpuExperts) -> list[torch.Tensor]:
    """The tensors that make up an expert, a slot a row."""

    def rows(stack: Matrices, bias: torch.Tensor | None, mats: int) -> list[torch.Tensor]:
        given = [x for x in (stack.data, stack.scale, bias) if x is not None]
        return [x.view(torch.uint8).view(len(stack) // mats, -1) for x in given]

    stacks = (experts.gate_up, experts.gate_up_bias, 2), (experts.down, experts.down_bias, 1)
    return [x for stack in stacks for x in rows(*stack)]


def check(out: GpuExperts, truth: GpuExperts, slots: list[int]) -> None:
    """Slot ``slots[e]`` holds expert e; the others are as ``empty_experts`` made them."""
    for mine, theirs in zip(parts(out), parts(truth), strict=True):
        for e, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(mine[slot].cpu(), theirs[e])
        rest = [slot for slot in range(len(mine)) if slot not in slots]
        assert mine[rest].eq(255).all()


KEPT = [
    ("bf16", ODD),
    ("fp8", PARTS),
    ("int8", PARTS),
    ("int8-channel", PARTS),
    ("int4", BIASED),
    ("int4-g128", PARTS),
    ("int4-channel", PARTS),
    ("mxfp4", BIASED),
    ("q4_k", WHOLE),
    ("q6_k", WHOLE),
]


@pytest.mark.parametrize(("name", "shape"), KEPT, ids=[name for name, _ in KEPT])
def test_bytes_are_those_of_experts_packed_for_the_gpu(
    name: str, shape: MoEShape, device: torch.device
) -> None:
    fmt = get_format(name)
    packed, weights, biases = made(shape, fmt)
    truth = GpuExperts.pack(fmt, weights, torch.device("cpu"), shape.spec, biases)
    out = empty_experts(fmt, shape.E + 1, shape, device)
    slots = list(range(shape.E, 0, -1))
    unpack_tiles(
        expert_tiles(packed, device), out, torch.tensor(slots, dtype=torch.int32).to(device)
    )
    check(out, truth, slots)


MIXED: list[tuple[str, str | None, MoEShape]] = [
    (name, None, PARTS if PARTS.H % FORMATS[name].k_multiple == 0 else SQUARE) for name in FORMATS
]
MIXED = [row for row in MIXED if row[0] != "bf16"] + [("q4_k", "q6_k", WHOLE)]


@pytest.mark.parametrize(("name", "down", "shape"), MIXED, ids=[f"{a}-{b}" for a, b, _ in MIXED])
def test_every_format_becomes_bfloat16(
    name: str, down: str | None, shape: MoEShape, device: torch.device
) -> None:
    fmt, bf16 = get_format(name), get_format("bf16")
    shape = replace(shape, E=1, topk=1)
    packed, weights, _ = made(shape, fmt, get_format(down) if down else None)
    down_fmt = packed.down_fmt
    plain = [
        (as_format("bf16", fmt, a), as_format("bf16", fmt, b), as_format("bf16", down_fmt, c))
        for a, b, c in weights
    ]
    truth = GpuExperts.pack(bf16, plain, torch.device("cpu"))
    out = empty_experts(bf16, 1, shape, device)
    unpack_tiles(
        expert_tiles(packed, device), out, torch.zeros(1, dtype=torch.int32, device=device)
    )
    check(out, truth, [0])


def test_the_largest_and_least_codes_and_scales_of_mxfp4_and_fp8(device: torch.device) -> None:
    """Random weights have neither E4M3's subnormal codes nor scales at the ends of E8M0."""
    shape = MoEShape(E=1, H=256, I=256, topk=1)
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    codes[(codes & 127) == 127] = 0
    eight = Weight(codes.view(torch.float8_e4m3fn), torch.rand(2, 2))
    four = Weight(codes & 15, (torch.arange(256 * 8) % 252).to(torch.uint8).view(256, 8))
    for name, weight in (("fp8", eight), ("mxfp4", four)):
        fmt = get_format(name)
        packed = PackedExperts(shape, fmt)
        packed.pack(0, weight, weight, weight)
        plain = as_format("bf16", fmt, weight)
        tiles, slots = (
            expert_tiles(packed, device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        for to, given in ((fmt, weight), (get_format("bf16"), plain)):
            out = empty_experts(to, 1, shape, device)
            unpack_tiles(tiles, out, slots)
            check(out, GpuExperts.pack(to, [(given,) * 3], torch.device("cpu")), [0])


SLICED = [("int4", replace(WIDE, spec=GPT_OSS)), ("fp8", WIDE), ("q6_k", WHOLE), ("bf16", WIDE)]


@pytest.mark.parametrize(("name", "shape"), SLICED, ids=[name for name, _ in SLICED])
def test_slices_of_numa_nodes_make_whole_experts(
    name: str, shape: MoEShape, device: torch.device
) -> None:
    fmt = get_format(name)
    packed, weights, biases = made(shape, fmt)
    split = SplitExperts(shape, fmt, [aligned_zeros] * 2, [_pack] * 2)
    split.take(packed)
    truth = GpuExperts.pack(fmt, weights, torch.device("cpu"), shape.spec, biases)
    out, slots = (
        empty_experts(fmt, 1, shape, device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    for rows, own in zip(split.rows, split.slices, strict=True):
        unpack_tiles(expert_tiles(own, device), out, slots, rows.start)
    check(out, truth, [0])
    with pytest.raises(PykernelsError, match="cut at multiples"):
        unpack_tiles(expert_tiles(split.slices[0], device), out, slots, 64)


def test_only_those_with_a_slot_are_written(device: torch.device) -> None:
    fmt, shape = get_format("int4"), MoEShape(E=4, H=64, I=64, topk=2)
    packed, weights, _ = made(shape, fmt)
    truth = GpuExperts.pack(fmt, weights, torch.device("cpu"))
    tiles = ExpertTiles.empty(shape, fmt, fmt, 6, device)
    for i, e in enumerate((3, 0, 1)):
        copy_expert(packed, e, tiles, i)
    out = empty_experts(fmt, 3, shape, device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    unpack_tiles(tiles.part(0, 3), out, slots)
    check(out, truth, [-1, 0, -1, 2])
    beyond = torch.full((6,), 3, dtype=torch.int32, device=device)  # one more than there are
    unpack_tiles(tiles, out, beyond)
    check(out, truth, [-1, 0, -1, 2])


def test_a_staging_buffer_holds_what_it_says(device: torch.device) -> None:
    fmt, down = get_format("q4_k"), get_format("q6_k")
    packed = PackedExperts(WHOLE, fmt, down_fmt=down)
    assert sum(section_bytes(WHOLE, fmt, down)) == packed.bytes_per_expert
    buffer = torch.zeros(ExpertTiles.bytes_needed(WHOLE, fmt, down, 3), dtype=torch.uint8)
    tiles = ExpertTiles.within(buffer, WHOLE, fmt, down, 3)
    assert tiles.nbytes == 3 * packed.bytes_per_expert and len(tiles.part(1, 2)) == 2
    assert all(s.untyped_storage().data_ptr() == buffer.data_ptr() for s in tiles.sections)
    with pytest.raises(PykernelsError, match="staging buffer"):
        ExpertTiles.within(buffer[1:], WHOLE, fmt, down, 3)
    with pytest.raises(PykernelsError, match="Stage more"):
        tiles.part(2, 2)
    with pytest.raises(PykernelsError, match="do not fit"):
        copy_expert(PackedExperts(WHOLE, fmt), 0, tiles, 0)
    with pytest.raises(PykernelsError, match="there are no"):
        copy_expert(packed, 2, tiles, 0)


def test_what_has_no_way_is_refused(device: torch.device) -> None:
    four, six, bf16 = (get_format(name) for name in ("q4_k", "q6_k", "bf16"))
    assert supports(four, four, 256, 512, four) is None
    assert supports(four, six, 256, 512, bf16) is None
    assert "cannot become q4_k" in str(supports(four, six, 256, 512, four))
    eight = get_format("fp8")
    assert "multiples of 64" in str(supports(eight, eight, 96, 128, eight))
    tiles = ExpertTiles.empty(WHOLE, four, six, 1, device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(PykernelsError, match="cannot become"):
        unpack_tiles(tiles, empty_experts(four, 1, WHOLE, device), slots)
    with pytest.raises(PykernelsError, match="the slots are"):
        unpack_tiles(tiles, empty_experts(bf16, 1, WHOLE, device), slots.long())
    with pytest.raises(PykernelsError, match="are no experts"):
        unpack_tiles(tiles, empty_experts(bf16, 1, replace(WHOLE, H=128), device), slots)


@pytest.mark.gpu
def test_a_run_of_pinned_experts_is_copied_without_waiting(device: torch.device) -> None:
    fmt, pinned = get_format("int4"), []

    def alloc(nbytes: int) -> torch.Tensor:
        pinned.append(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True))
        return pinned[0]

    packed = PackedExperts(PARTS, fmt, alloc)
    tiles = ExpertTiles.empty(PARTS, fmt, fmt, PARTS.E, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy_experts(packed, range(PARTS.E), tiles)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for mine, theirs in zip(tiles.sections, packed.sections, strict=True):
        assert torch.equal(mine.cpu().flatten(), theirs.view(torch.uint8).flatten())


def _compile(name: str, to: str) -> None:
    fmt, out, meta = get_format(name), get_format(to), torch.device("meta")
    shape = MoEShape(E=2, H=2048, I=768, topk=2)
    tiles = ExpertTiles.empty(shape, fmt, fmt, 2, meta)
    there = GpuExperts.empty(out, 2, shape.H, shape.I, meta)
    unpack_tiles(tiles, there, torch.empty(2, dtype=torch.int32, device=meta))


def _call(name: str, to: str) -> tuple[str, Callable[[], None]]:
    return f"{name} to {to}", lambda: _compile(name, to)


COMPILES = [_call("q4_k", "q4_k"), _call("int4-zp", "bf16")]
COMPILES_ON_A_GPU = [
    *(_call(name, name) for name, _ in KEPT if name != "q4_k"),
    *(_call(name, "bf16") for name in FORMATS if name not in ("bf16", "int4-zp")),
]
