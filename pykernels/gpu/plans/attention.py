"""The launch plans of attention and the shipped ones: data, from shapes and the GPU.

Never from lengths: a graph that was captured once is replayed with other lengths, so the grid has
room for the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import PykernelsError
from ..common.launch import arch
from .attention_shape import AttentionShape
from .gemm import at_least, at_most, powers_of_two

MAX_HEAD = 512
"""Numbers of a head at most: a block of keys and values and a result of 16 rows have room."""
MOST_SPLIT = 64
"""Sequences of a batch beyond which none is split: they fill the GPU anyway."""


def _can_be_compiled(plan: DecodePlan | PrefillPlan) -> None:
    """Raises PykernelsError for what no GPU has room for, or Triton no form."""
    at_most(256, plan, "rows", "keys")
    at_most(32, plan, "num_warps")
    at_most(16, plan, "num_stages")


@dataclass(frozen=True)
class DecodePlan:
    """One decode kernel's launch; Triton's, unless it names another: ``warp_specialized``,
    ``fp8_mma`` or ``ring_buffer``.

    Attributes:
        rows: query rows (heads x tokens) of a CTA: 16, or 64 for Hopper's wgmma.
        keys: of one block.
        num_warps, num_stages: Triton's (1 does not prefetch).
        ctas_per_sm: that an SM holds at a time; sequences are split to fill that many, once; 0:
            none is split.
        split_scores: MLA with 64 rows and 8 warps only: the two warpgroups divide each block of
            scores by columns, instead of each computing all of it.
        warp_specialized: MLA's kernel for Hopper with a producer and two consumer warpgroups: 64
            rows, 64 keys; ``num_warps``, ``num_stages`` and ``split_scores`` mean nothing to it.
        min_blocks: blocks of a split at least, where combining more splits costs more than shorter
            ones save.
        fp8_mma: GQA's kernel for E4M3 that dequantizes operands in the registers of the tensor
            cores: 8 or 16 rows, 16 or 32 keys a warp; ``num_stages`` means nothing to it.
        ring_buffer: GQA's kernel for Hopper with a ring buffer of ``num_stages`` blocks in shared
            memory: 16 rows, 64 keys, 4 warps.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    split_scores: bool = False
    warp_specialized: bool = False
    min_blocks: int = 1
    fp8_mma: bool = False
    ring_buffer: bool = False

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "keys", "num_warps")
        at_least(16 if not self.fp8_mma else 8, self, "rows", "keys")  # of an mma's operands
        at_least(1, self, "num_stages", "min_blocks")
        at_least(0, self, "ctas_per_sm")
        at_most(32, self, "ctas_per_sm")  # no SM holds more
        _can_be_compiled(self)
        if len(self._kernels) > 1:
            raise PykernelsError(
                f"a decode plan is {' and '.join(self._kernels)}",
                "These are different kernels: keep one",
            )
        per_warp = self.keys // self.num_warps
        if self.fp8_mma and (self.rows not in (8, 16) or per_warp not in (16, 32)):
            raise PykernelsError(
                f"an fp8_mma decode plan has {self.rows} rows and {per_warp} keys a warp",
                "That kernel takes 8 or 16, and 16 or 32",
            )
        if self.ring_buffer and (self.rows, self.keys, self.num_warps) != (16, 64, 4):
            raise PykernelsError(
                f"a ring_buffer decode plan has {self.rows} rows, {self.keys} keys and"
                f" {self.num_warps} warps",
                "That kernel takes 16, 64 and 4",
            )
        if self.warp_specialized and (self.rows, self.keys) != (64, 64):
            raise PykernelsError(
                f"a warp_specialized decode plan has {self.rows} rows and {self.keys} keys",
                "That kernel takes 64 and 64",
            )

    @property
    def _kernels(self) -> list[str]:
        names = ("warp_specialized", "fp8_mma", "ring_buffer")
        return [name for name in names if getattr(self, name)]

    @property
    def kernel(self) -> str:
        """The field that names the plan's kernel; "" is Triton's."""
        return "".join(self._kernels)

    def total_splits(self, B: int, ctas: int, max_length: int, num_sms: int) -> int:
        """Splits of ``B`` sequences, at least one each; the GPU holds all their CTAs at a time.

        Args:
            ctas: of one split: for other rows or KV heads.
            max_length: of a sequence.
        """
        if B > MOST_SPLIT:
            return B
        fill = max(B, self.ctas_per_sm * num_sms // max(1, ctas))
        blocks = B * -(-max_length // self.keys)
        each = max(self.min_blocks, -(-blocks // fill))  # no empty split has to be combined
        return max(B, -(-blocks // each))


@dataclass(frozen=True)
class PrefillPlan:
    """One prefill kernel's launch.

    Attributes:
        rows, keys: of a block.
        num_warps, num_stages: Triton's.
        warp_specialized: the kernel for Hopper whose warps copy or multiply: 128 rows, 64 or
            128 keys; ``num_warps`` and ``num_stages`` mean nothing to it.
        unpack: keys and values in E4M3 become bf16 rows first; means nothing to others.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    warp_specialized: bool = False
    unpack: bool = False

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "keys", "num_warps")
        at_least(16, self, "rows", "keys")
        at_least(1, self, "num_stages")
        _can_be_compiled(self)
        if self.warp_specialized and (self.rows != 128 or self.keys not in (64, 128)):
            raise PykernelsError(
                f"a warp_specialized prefill plan has {self.rows} rows and {self.keys} keys",
                "That kernel takes 128 and 64 or 128",
            )


# Which sizes a kernel is for, on any GPU.


def warp_specialized_fits(L: int, R: int, fp8: bool, page: int) -> bool:
    """Whether MLA's ``DecodePlan.warp_specialized`` is for these: DeepSeek's sizes.

    It copies whole pages, and less than eight rows are no tile of shared memory. A block of E4M3 is
    read as one piece of memory.
    """
    return (L, R) == (512, 64) and page >= (64 if fp8 else 8)


def fp8_mma_fits(D: int, fp8: bool, page: int) -> bool:
    """Whether ``DecodePlan.fp8_mma`` is for these: heads of 128 in E4M3.

    A warp's keys, up to 32, are within a page.
    """
    return D == 128 and fp8 and page % 32 == 0


def ring_buffer_fits(D: int, fp8: bool, page: int) -> bool:
    """Whether ``DecodePlan.ring_buffer`` is for these: heads of 128 in bf16.

    A block of 64 keys is within a page.
    """
    return D == 128 and not fp8 and page % 64 == 0


def decode_kernel_fits(op: str, plan: DecodePlan, shape: AttentionShape, fp8: bool) -> bool:
    """Whether the kernel that the plan names is for this op and these sizes."""
    given = (fp8, shape.page)
    if op == "mla_decode":
        sizes = (shape.head_dim, shape.rope)
        return not plan.kernel or (plan.warp_specialized and warp_specialized_fits(*sizes, *given))
    fits = {"": True, "warp_specialized": False}
    fits["fp8_mma"] = fp8_mma_fits(shape.head_dim, *given)
    fits["ring_buffer"] = ring_buffer_fits(shape.head_dim, *given)
    return fits[plan.kernel]


def decode_kernel_runs(
    op: str, plan: DecodePlan, shape: AttentionShape, fp8: bool, aligned: bool, device: torch.device
) -> bool:
    """Whether the kernel that the plan names can run here: sizes that fit, caches ``aligned`` to 16
    bytes, and Hopper or, for ``fp8_mma``, any GPU that converts E4M3."""
    if not plan.kernel:
        return True
    has = arch(device) >= (8, 9) if plan.fp8_mma else arch(device)[0] == 9
    return has and aligned and decode_kernel_fits(op, plan, shape, fp8)


_PREFILL_SHARED = 222 << 10
"""Bytes of 227 KiB that barriers and what is staged on the way out leave."""


def warp_specialized_prefill_fits(D: int, DV: int, R: int, page: int, keys: int = 64) -> bool:
    """Whether ``PrefillPlan.warp_specialized`` with blocks of ``keys`` is for heads like these.

    It copies whole pages, and less than eight rows are no tile of shared memory, which holds 128
    queries and two blocks of keys and values.
    """
    sizes = D in (64, 128, 256) and DV in (64, 128, 256) and R in (0, 64)
    shared = 2 * (128 * (D + R) + 2 * keys * (D + R + DV))
    return sizes and (page == 0 or page >= 8) and shared <= _PREFILL_SHARED


def prefill_kernel_runs(
    plan: PrefillPlan, shape: AttentionShape, fp8: bool, aligned_rows: bool, device: torch.device
) -> bool:
    """Whether the plan's kernel can run here; the warp-specialised one: see ``shipped_prefill``.

    Keys in E4M3 must become rows of bf16 first.
    """
    if not plan.warp_specialized:
        return True
    sizes = (shape.head_dim, shape.value_dim, shape.rope)
    fits = warp_specialized_prefill_fits(*sizes, 0 if fp8 else shape.page, plan.keys)
    return arch(device)[0] == 9 and fits and aligned_rows and (plan.unpack or not fp8)


# The shipped plans. Of MLA's decode by (first compute capability, most rows that want it).

_TINY_DECODE = DecodePlan(rows=16, keys=16, num_warps=4, num_stages=1)
_TINY_PREFILL = PrefillPlan(rows=16, keys=16, num_warps=4, num_stages=1)
_WARP_SPECIALIZED = DecodePlan(rows=64, keys=64, num_warps=8, num_stages=2, warp_specialized=True)
_SIXTEEN = DecodePlan(rows=16, keys=64, num_warps=8, num_stages=3)
_MLA_DECODE = {
    (9, 0): ((16, _SIXTEEN), (1 << 30, _WARP_SPECIALIZED)),
    (8, 0): ((1 << 30, DecodePlan(rows=16, keys=32, num_warps=4, num_stages=2)),),
}
_MLA_DECODE_FP8 = {
    (9, 0): ((1 << 30, _WARP_SPECIALIZED),),
    (8, 0): ((1 << 30, DecodePlan(rows=16, keys=32, num_warps=8, num_stages=2)),),
}


def shipped_decode(
    op: str, shape: AttentionShape, fp8: bool, device: torch.device, aligned: bool = True
) -> DecodePlan:
    """The plan of this package for ``op`` = "mla_decode" or "gqa_decode".

    Args:
        fp8: the cache is in E4M3.
        aligned: it begins at a multiple of 16 bytes.
    """
    if arch(device) == (0, 0):
        return _TINY_DECODE
    rows = shape.queries * shape.heads // shape.kv_heads  # that attend to the same keys
    if op == "mla_decode":
        return _shipped_mla(shape, rows, fp8, aligned, device)
    return _shipped_gqa(shape, rows, fp8, aligned, device)


def _shipped_mla(
    shape: AttentionShape, rows: int, fp8: bool, aligned: bool, device: torch.device
) -> DecodePlan:
    table = _MLA_DECODE_FP8 if fp8 else _MLA_DECODE
    rules = table[(9, 0)] if arch(device)[0] == 9 else table[(8, 0)]
    plan = next(plan for most, plan in rules if rows <= most)
    if decode_kernel_runs("mla_decode", plan, shape, fp8, aligned, device):
        return plan
    return _SIXTEEN if rows <= 16 else replace(plan, warp_specialized=False, split_scores=True)


def _shipped_gqa(
    shape: AttentionShape, rows: int, fp8: bool, aligned: bool, device: torch.device
) -> DecodePlan:
    capability, D = arch(device), shape.head_dim
    if rows <= 16:
        tile = 8 if rows <= 8 else 16
        for plan in (
            DecodePlan(rows=tile, keys=128, num_warps=4, num_stages=1, ctas_per_sm=2, fp8_mma=True),
            DecodePlan(rows=16, keys=64, num_warps=4, num_stages=6, ring_buffer=True),
        ):
            if decode_kernel_runs("gqa_decode", plan, shape, fp8, aligned, device):
                return plan
    tile = max(16, min(64, 1 << (rows - 1).bit_length()))
    if capability[0] == 9 and tile < 64 and 64 < D <= 128 and not fp8:
        return DecodePlan(rows=tile, keys=128, num_warps=4, num_stages=3)
    roomy = capability[0] == 9 or capability in ((8, 0), (10, 0))  # at least 160 KiB an SM
    if D > 256:
        return DecodePlan(rows=tile, keys=32 if roomy else 16, num_warps=8, num_stages=2)
    keys = 64 if D <= 128 else 32
    num_stages = (4 if roomy else 2) if D <= 128 else (3 if roomy else 2)
    ctas_per_sm = 2 if tile < 64 else 1
    return DecodePlan(
        rows=tile, keys=keys, num_warps=4, num_stages=num_stages, ctas_per_sm=ctas_per_sm
    )


def worth_unpacking(rows: int, nbytes: int) -> bool:
    """Whether E4M3 should become bf16 before a prefill: if enough ``rows`` read each key.

    Args:
        rows: queries of a sequence x query heads of a KV head.
        nbytes: bytes for all keys that the page table has room for.
    """
    return rows >= 512 and nbytes <= 2 << 30


def shipped_prefill(
    shape: AttentionShape, fp8: bool, unpack: bool, aligned_rows: bool, device: torch.device
) -> PrefillPlan:
    """The plan of this package.

    Args:
        fp8: keys and values are in E4M3.
        unpack: they should become bf16 first.
        aligned_rows: those of queries and of keys in bf16: every head's at a multiple of 16 bytes,
            and within 2 ** 31 elements.
    """
    if unpack:  # into rows without pages
        rows = shape._replace(page=0)
        return replace(shipped_prefill(rows, False, False, aligned_rows, device), unpack=True)
    capability = arch(device)
    if capability == (0, 0):
        return _TINY_PREFILL
    D, R = shape.head_dim, shape.rope
    large = D + R > 192 or shape.value_dim > 128
    keys = 64 if large else 128
    plan = PrefillPlan(rows=128, keys=keys, num_warps=8, num_stages=1, warp_specialized=True)
    if prefill_kernel_runs(plan, shape, fp8, aligned_rows, device):
        return plan
    if max(D, shape.value_dim) > 256:
        roomy = capability[0] == 9
        most, keys = (64, 32) if roomy else (32, 16)
        return PrefillPlan(rows=most, keys=keys, num_warps=8, num_stages=2)
    if capability[0] == 9:
        if large or R:
            return PrefillPlan(rows=128, keys=64, num_warps=8, num_stages=2 if large else 3)
        if fp8:  # converted keys and values need registers too
            return PrefillPlan(rows=128, keys=64, num_warps=8, num_stages=2)
        return PrefillPlan(rows=128, keys=128, num_warps=8, num_stages=3 if D <= 64 else 2)
    if large or R:  # a rotated part beside values of 256 spills with 4 warps
        return PrefillPlan(
            rows=64, keys=32, num_warps=8 if R and shape.value_dim > 128 else 4, num_stages=2
        )
    return PrefillPlan(rows=128, keys=64 if D <= 64 else 32, num_warps=4, num_stages=2)
