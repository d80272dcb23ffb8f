"""Staged experts from the CPU's tiles to the GPU's matrices, beside a plain copy of their bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.harness.timing.case import Case, built, rotating, sets_for
from pykernels.errors import PykernelsError
from pykernels.gpu.moe.experts import GpuExperts
from pykernels.gpu.moe.from_tiles import ExpertTiles, supports, unpack_tiles
from pykernels.quant import get_format
from pykernels.shapes import MoEShape

QWEN3_30B, DEEPSEEK_V3 = (2048, 768), (7168, 2048)


def unpack_case(
    format: str, to: str, experts: int, H: int, inter: int, device: torch.device
) -> Case:
    """Bytes: tiles read, matrices written.

    Raises:
        PykernelsError: such tiles cannot become such matrices.
    """
    fmt, out_fmt = get_format(format), get_format(to)
    if reason := supports(fmt, fmt, H, inter, out_fmt):
        raise PykernelsError(reason, "Give to=bf16")
    shape = MoEShape(experts, H, inter, 1)
    out = GpuExperts.empty(out_fmt, experts, H, inter, device)
    slots = torch.arange(experts, dtype=torch.int32, device=device)
    tiles = ExpertTiles.empty(shape, fmt, fmt, experts, device)
    written = experts * (2 * out.gate_up.nbytes + out.down.nbytes)
    sets = [(tiles,)]
    for _ in range(sets_for(tiles.nbytes + written, device) - 1):
        sets.append((ExpertTiles.empty(shape, fmt, fmt, experts, device),))
    for (staged,) in sets:
        for section in staged.sections:
            section.random_(0, 60)  # scales that are finite
    copy = torch.empty(tiles.nbytes, dtype=torch.uint8, device=device)

    def peer(staged: ExpertTiles) -> None:
        at = 0
        for section in staged.sections:
            if section.numel():
                copy[at : at + section.numel()].copy_(section.flatten())
                at += section.numel()

    return Case(
        "unpack_tiles",
        "unpack_tiles",
        {"format": format, "to": to, "experts": experts, "hidden": H, "inter": inter},
        rotating(lambda staged: unpack_tiles(staged, out, slots), sets),
        tiles.nbytes + written,
        0,
        {"device copy": rotating(peer, sets)},
        len(sets),
    )


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """What a link of 55 GB/s brings in a few milliseconds."""
    kept = [("q4_k", 64, *QWEN3_30B), ("fp8", 4, *DEEPSEEK_V3)]
    if not quick:
        kept += [(name, 64, *QWEN3_30B) for name in ("bf16", "int8", "int4", "mxfp4", "q6_k")]
        kept += [("q4_k", 1, *QWEN3_30B)]
    for name, *sizes in kept:
        yield built("unpack_tiles", unpack_case, name, name, *sizes, device)
    for name in ("q5_k",) if quick else ("q5_k", "q4_k", "q6_k", "q8_0", "int4-zp", "fp8-channel"):
        yield built("unpack_tiles", unpack_case, name, "bf16", 32, *QWEN3_30B, device)


def case(
    device: torch.device,
    format: str = "q4_k",
    to: str = "q4_k",
    experts: int = 64,
    hidden: int = 2048,
    inter: int = 768,
) -> Case:
    """One case."""
    return unpack_case(format, to, experts, hidden, inter, device)
