"""Paged caches for the attention tests: pages in random order, NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pykernels.testing import relative_error

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass
class Paged:
    """A cache and its page table.

    ``values`` [P, page, *token] bf16 or E4M3; ``scales`` float32 [P, page, *heads] or None;
    ``table`` int32 [B, pages]; ``lengths`` int32 [B].
    """

    values: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    table: torch.Tensor
    lengths: torch.Tensor


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and one float32 scale for each row of the last dimension."""
    scale = x.float().abs().amax(-1).clamp_min(1e-12) / 448
    return (x.float() / scale[..., None]).to(FP8), scale


def make_cache(
    lengths: list[int],
    page: int,
    tokens: list[tuple[int, ...]],
    device: torch.device,
    *,
    fp8: tuple[bool, ...] = (),
    spare: int = 1,
) -> Paged:
    """Random caches, one tensor for each shape of ``tokens``, that share a page table.

    Args:
        lengths: keys of each sequence.
        fp8: which of the tensors are E4M3 with scales.
        spare: unused entries at each row's end; they name a page that does not exist.
    """
    counts = [-(-length // page) for length in lengths]
    width = max(counts) + spare
    P = sum(counts) + 3
    free = torch.randperm(P).tolist()
    table = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)
    used = torch.zeros(P, page, dtype=torch.bool)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for j in range(count):
            table[b, j] = free.pop()
            used[table[b, j], : length - j * page] = True
    values, scales = [], []
    for token, narrow in zip(tokens, fp8 or [False] * len(tokens), strict=True):
        x = torch.randn(P, page, *token)
        hole = ~used.view(P, page, *[1] * len(token))
        if narrow:
            codes, scale = quantized(x)
            holes = codes.view(torch.uint8).masked_fill(hole, 0x7F)  # NaN
            values.append(holes.view(FP8).to(device))
            scales.append(scale.masked_fill(hole[..., 0], float("nan")).to(device))
        else:
            values.append(x.to(BF16).masked_fill(hole, float("nan")).to(device))
            scales.append(None)
    where = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Paged(values, scales, table.to(device), where)


def no_worse(result: torch.Tensor, exact: torch.Tensor, native: torch.Tensor) -> None:
    """The error against float64 is at most that of torch in bf16, or of the shares' rounding and
    the result's, 1.7e-3 each; the interpreter cuts bits off, which is twice as far off."""
    roundings = 8e-3 if result.device.type == "cpu" else 4e-3
    error, yardstick = relative_error(result, exact), relative_error(native, exact)
    assert error <= max(yardstick, roundings), f"error {error:.2e}, torch in bf16 {yardstick:.2e}"
