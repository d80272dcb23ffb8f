"""The shipped launch plans of attention: data, from shapes and the GPU, never from lengths.

A graph that was captured once is replayed with other lengths, so the grid has room for the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import PykernelsError
from ..common.launch import arch, num_sms
from .gemm import at_least, at_most, powers_of_two

MOST_SHARED = 64
"""Sequences of a batch beyond which every one has one program: they fill the GPU anyway."""


def _can_be_compiled(plan: DecodePlan | PrefillPlan) -> None:
    """Raises PykernelsError for what no GPU has room for, or Triton no form."""
    at_most(256, plan, "rows", "keys")
    at_most(32, plan, "warps")
    at_most(16, plan, "stages")


@dataclass(frozen=True)
class DecodePlan:
    """One decode kernel's launch.

    Attributes:
        rows: query rows (heads x tokens) of a program: 16, or 64 for Hopper's wgmma.
        keys: of one block.
        warps, stages: Triton's num_warps and num_stages (1 does not prefetch).
        per_sm: programs that an SM holds at a time; sequences are cut to fill that many, once; 0:
            none is cut.
        across: MLA with 64 rows and 8 warps only: both warpgroups share each block of scores by
            columns, instead of each computing all of it.
        warp_specialized: MLA's kernel for Hopper, whose warps have roles: 64 rows, 64 keys;
            ``warps``, ``stages`` and ``across`` mean nothing to it.
        least: blocks of a part at least, where combining more parts costs more than shorter ones
            save.
        in_lanes: GQA's kernel whose lanes multiply what they load: 8 or 16 rows, 16 or 32 keys a
            warp; ``stages`` means nothing to it.
        in_ring: GQA's kernel for Hopper with a ring of ``stages`` blocks: 16 rows, 64 keys, 4
            warps.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_sm: int = 1
    across: bool = False
    warp_specialized: bool = False
    least: int = 1
    in_lanes: bool = False
    in_ring: bool = False

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "keys", "warps")
        at_least(16 if not self.in_lanes else 8, self, "rows", "keys")  # of a product's operands
        at_least(1, self, "stages", "least")
        at_least(0, self, "per_sm")
        at_most(32, self, "per_sm")  # no SM holds more
        _can_be_compiled(self)
        kernels = [
            name for name in ("warp_specialized", "in_lanes", "in_ring") if getattr(self, name)
        ]
        if len(kernels) > 1:
            raise PykernelsError(
                f"a decode plan is {' and '.join(kernels)}", "These are different kernels: keep one"
            )
        each = self.keys // self.warps
        if self.in_lanes and (self.rows not in (8, 16) or each not in (16, 32)):
            raise PykernelsError(
                f"a decode plan in lanes has {self.rows} rows and {each} keys a warp",
                "That kernel's programs take 8 or 16, and 16 or 32",
            )
        if self.in_ring and (self.rows, self.keys, self.warps) != (16, 64, 4):
            raise PykernelsError(
                f"a decode plan with a ring has {self.rows} rows, {self.keys} keys and"
                f" {self.warps} warps",
                "That kernel's programs take 16, 64 and 4",
            )
        if self.warp_specialized and (self.rows, self.keys) != (64, 64):
            raise PykernelsError(
                f"a decode plan by hand has {self.rows} rows and {self.keys} keys",
                "That kernel's programs take 64 and 64",
            )

    def slots(self, B: int, programs: int, max_length: int, sms: int) -> int:
        """Programs that share ``B`` sequences, at least one each; the GPU holds them all at a time.

        Args:
            programs: that do the same part of a sequence for other rows or KV heads.
            max_length: of a sequence.
        """
        if B > MOST_SHARED:
            return B
        fill = max(B, self.per_sm * sms // max(1, programs))
        blocks = B * -(-max_length // self.keys)
        each = max(self.least, -(-blocks // fill))  # no part is empty that has to be combined
        return max(B, -(-blocks // each))


@dataclass(frozen=True)
class PrefillPlan:
    """One prefill kernel's launch.

    Attributes:
        rows, keys: of a block.
        warps, stages: Triton's num_warps and num_stages.
        warp_specialized: the kernel for Hopper whose warps copy or multiply: 128 rows, 64 or
            128 keys; ``warps`` and ``stages`` mean nothing to it.
        unpack: keys and values in E4M3 become bf16 rows first; means nothing to others.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    warp_specialized: bool = False
    unpack: bool = False

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "keys", "warps")
        at_least(16, self, "rows", "keys")
        at_least(1, self, "stages")
        _can_be_compiled(self)
        if self.warp_specialized and (self.rows != 128 or self.keys not in (64, 128)):
            raise PykernelsError(
                f"a prefill plan by hand has {self.rows} rows and {self.keys} keys",
                "That kernel's programs take 128 and 64 or 128",
            )


sms = num_sms

_TINY_DECODE = DecodePlan(rows=16, keys=16, warps=4, stages=1)
_TINY_PREFILL = PrefillPlan(rows=16, keys=16, warps=4, stages=1)

# By (first compute capability, most rows that want it), the first that fits.
_MLA_DECODE = {
    (9, 0): (
        (16, DecodePlan(rows=16, keys=64, warps=8, stages=3)),
        (1 << 30, DecodePlan(rows=64, keys=64, warps=8, stages=2, warp_specialized=True)),
    ),
    (8, 0): ((1 << 30, DecodePlan(rows=16, keys=32, warps=4, stages=2)),),
}
_MLA_DECODE_FP8 = {
    (9, 0): ((1 << 30, DecodePlan(rows=64, keys=64, warps=8, stages=2, warp_specialized=True)),),
    (8, 0): ((1 << 30, DecodePlan(rows=16, keys=32, warps=8, stages=2)),),
}


def warp_specialized_fits(L: int, R: int, fp8: bool, page: int) -> bool:
    """Whether ``DecodePlan.warp_specialized`` is for DeepSeek's sizes, as these are.

    Its copies are of whole pages; less than eight rows are no tile of shared memory. A block of
    E4M3 is read as one piece of memory.
    """
    return (L, R) == (512, 64) and page >= (64 if fp8 else 8)


def warp_specialized_takes(
    L: int, R: int, fp8: bool, page: int, device: torch.device, aligned: bool = True
) -> bool:
    """Whether ``DecodePlan.warp_specialized`` can run: Hopper, sizes that fit, caches ``aligned``
    to 16."""
    return arch(device)[0] == 9 and warp_specialized_fits(L, R, fp8, page) and aligned


def mla_decode_plan(
    rows: int,
    latent: tuple[int, int],
    fp8: bool,
    page: int,
    device: torch.device,
    aligned: bool = True,
) -> DecodePlan:
    """For ``rows`` = heads x tokens a sequence and latents of (L, R) in pages of ``page``."""
    capability = arch(device)
    if capability == (0, 0):
        return _TINY_DECODE
    table = _MLA_DECODE_FP8 if fp8 else _MLA_DECODE
    rules = table[(9, 0)] if capability[0] == 9 else table[(8, 0)]
    plan = next(plan for most, plan in rules if rows <= most)
    if plan.warp_specialized and not warp_specialized_takes(*latent, fp8, page, device, aligned):
        if rows <= 16:
            return DecodePlan(rows=16, keys=64, warps=8, stages=3)
        return replace(plan, warp_specialized=False, across=True)
    return plan


def in_lanes_fits(D: int, fp8: bool, page: int) -> bool:
    """Whether ``DecodePlan.in_lanes`` is for heads of 128 in E4M3, as these are.

    A warp's keys, up to 32, are within a page.
    """
    return D == 128 and fp8 and page % 32 == 0


def in_lanes_takes(D: int, fp8: bool, page: int, device: torch.device, aligned: bool) -> bool:
    """Whether ``DecodePlan.in_lanes`` can run: the GPU converts E4M3, caches ``aligned`` to 16."""
    return arch(device) >= (8, 9) and in_lanes_fits(D, fp8, page) and aligned


def in_ring_fits(D: int, fp8: bool, page: int) -> bool:
    """Whether ``DecodePlan.in_ring`` is for heads of 128 in bf16, as these are.

    A block of 64 keys is within a page.
    """
    return D == 128 and not fp8 and page % 64 == 0


def in_ring_takes(D: int, fp8: bool, page: int, device: torch.device, aligned: bool) -> bool:
    """Whether ``DecodePlan.in_ring`` can run: Hopper, sizes that fit, caches ``aligned`` to 16."""
    return arch(device)[0] == 9 and in_ring_fits(D, fp8, page) and aligned


def gqa_decode_plan(
    rows: int, D: int, fp8: bool, page: int, device: torch.device, aligned: bool = True
) -> DecodePlan:
    """For ``rows`` = query heads of a KV head x tokens a sequence, and pages of ``page``."""
    capability = arch(device)
    if capability == (0, 0):
        return _TINY_DECODE
    if rows <= 16 and in_lanes_takes(D, fp8, page, device, aligned):
        tile = 8 if rows <= 8 else 16
        return DecodePlan(rows=tile, keys=128, warps=4, stages=1, per_sm=2, in_lanes=True)
    if rows <= 16 and in_ring_takes(D, fp8, page, device, aligned):
        return DecodePlan(rows=16, keys=64, warps=4, stages=6, in_ring=True)
    tile = max(16, min(64, 1 << (rows - 1).bit_length()))
    if capability[0] == 9 and tile < 64 and 64 < D <= 128 and not fp8:
        return DecodePlan(rows=tile, keys=128, warps=4, stages=3)
    roomy = capability[0] == 9 or capability in ((8, 0), (10, 0))  # at least 160 KiB an SM
    keys = 64 if D <= 128 else 32
    stages = (4 if roomy else 2) if D <= 128 else (3 if roomy else 2)
    return DecodePlan(rows=tile, keys=keys, warps=4, stages=stages, per_sm=2 if tile < 64 else 1)


def warp_specialized_prefill_fits(D: int, DV: int, R: int, page: int, keys: int = 64) -> bool:
    """Whether ``PrefillPlan.warp_specialized`` with blocks of ``keys`` is for heads like these.

    Its copies are of whole pages; less than eight rows are no tile of shared memory, which holds
    128 queries and two blocks of keys and values.
    """
    sizes = D in (64, 128, 256) and DV in (64, 128, 256) and R in (0, 64)
    shared = 2 * (128 * (D + R) + 2 * keys * (D + R + DV))
    return sizes and (page == 0 or page >= 8) and shared <= _PREFILL_SHARED


_PREFILL_SHARED = 222 << 10
"""Bytes of 227 KiB that barriers and what is staged on the way out leave."""


def warp_specialized_prefill_takes(
    D: int, DV: int, R: int, page: int, device: torch.device, keys: int = 64
) -> bool:
    """Whether ``PrefillPlan.warp_specialized`` can run, apart from how its tensors lie: Hopper
    only."""
    return arch(device)[0] == 9 and warp_specialized_prefill_fits(D, DV, R, page, keys)


def warp_specialized_prefills(
    D: int, DV: int, R: int, fp8: bool, plan: PrefillPlan, aligned_rows: bool, page: int,
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether this plan by hand can run on these: see ``prefill_plan``.

    Keys in E4M3 must become rows of bf16 first.
    """
    takes = warp_specialized_prefill_takes(D, DV, R, 0 if fp8 else page, device, plan.keys)
    unpack = plan.unpack
    return aligned_rows and (unpack or not fp8) and takes


def worth_unpacking(rows: int, room: int) -> bool:
    """Whether E4M3 should become bf16 before a prefill: if enough ``rows`` read each key.

    Args:
        rows: queries of a sequence x query heads of a KV head.
        room: bytes for all keys that the page table has room for.
    """
    return rows >= 512 and room <= 2 << 30


def prefill_plan(
    D: int, DV: int, R: int, fp8: bool, unpack: bool, aligned_rows: bool, page: int,
    device: torch.device,
) -> PrefillPlan:  # fmt: skip
    """For heads of D + R on values of DV.

    Args:
        unpack: E4M3 should become bf16 first.
        aligned_rows: those of queries and of keys in bf16: every head's at a multiple of 16 bytes,
            and within 2 ** 31 elements.
        page: keys of one, 0 without pages.
    """
    if unpack:
        plan = prefill_plan(D, DV, R, False, False, aligned_rows, 0, device)
        return replace(plan, unpack=True)
    capability = arch(device)
    if capability == (0, 0):
        return _TINY_PREFILL
    large = D + R > 192 or DV > 128
    if aligned_rows and not fp8 and warp_specialized_prefill_takes(D, DV, R, page, device):
        keys = 64 if large else 128
        return PrefillPlan(rows=128, keys=keys, warps=8, stages=1, warp_specialized=True)
    if capability[0] == 9:
        if large or R:
            return PrefillPlan(rows=128, keys=64, warps=8, stages=2 if large else 3)
        if fp8:  # converted keys and values need registers too
            return PrefillPlan(rows=128, keys=64, warps=8, stages=2)
        return PrefillPlan(rows=128, keys=128, warps=8, stages=3 if D <= 64 else 2)
    if large or R:  # a rotated part beside values of 256 spills with 4 warps
        return PrefillPlan(rows=64, keys=32, warps=8 if R and DV > 128 else 4, stages=2)
    return PrefillPlan(rows=128, keys=64 if D <= 64 else 32, warps=4, stages=2)
