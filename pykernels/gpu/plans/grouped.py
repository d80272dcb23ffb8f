"""Launch plans of the matrix products, as data: nothing is tuned while a model runs.

A plan is chosen by operation, weight kind, GPU generation, and how many rows an expert (or the
linear) has on average: shapes only, never routing. The first of these that fits is taken: the
``plan=`` argument; a line of the file that ``python -m bench.tune`` writes for this GPU (see
``tuned``); the table below, or for kernels that dequantize in registers the functions of
``registers``.

Why the table is as it is (Hopper): a bf16 tile of 128 x 256 reads 48 bytes a cycle from L2 for a
tensor core's full rate, one of 128 x 128 already 64; with up to 64 rows an expert is bound by
reading its weights, so tiles are small and several programs share an SM. A plan that was
measured elsewhere is only slow, never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .gemm import GemmPlan, GemvInt8Plan
from .tuned import tuned_plan

OPS = ("gate_up", "down", "linear")
PATHS = ("bf16", "fp8", "dequant")
"""bf16 and fp8: both operands as they are; dequant: weights become bf16 in registers."""


@dataclass(frozen=True)
class Row:
    """One line of the table: applies to up to ``rows`` rows an expert on these generations."""

    generations: tuple[str, ...]
    path: str
    ops: tuple[str, ...]
    rows: float
    plan: GemmPlan


HOPPER = ("hopper", "blackwell")
SMALL = ("ampere", "ada")
"""100 KiB of shared memory on some of them, no tensor memory accelerator."""
ANY = float("inf")
_GATED, _PLAIN = ("gate_up",), ("down", "linear")
_WARP_SPECIALIZED = GemmPlan(128, 128, 128, 4, warp_specialized=True)
_BF16_LARGE = GemmPlan(128, 256, 64, 16, num_warps=8, num_stages=4, tma=True)

TABLE = (
    Row(HOPPER, "bf16", OPS, 16, GemmPlan(16, 128, 128, num_warps=4, num_stages=4, tma=True)),
    Row(HOPPER, "bf16", OPS, 32, GemmPlan(32, 128, 128, num_warps=4, num_stages=3, tma=True)),
    Row(HOPPER, "bf16", OPS, 96, GemmPlan(64, 128, 64, 8, num_warps=4, num_stages=4, tma=True)),
    Row(HOPPER, "bf16", OPS, 192, _BF16_LARGE),
    Row(("hopper",), "bf16", ("down",), ANY, _WARP_SPECIALIZED),
    Row(HOPPER, "bf16", OPS, ANY, _BF16_LARGE),
    Row(HOPPER, "fp8", OPS, 32, GemmPlan(32, 64, 128, num_warps=4, num_stages=4, tma=True)),
    Row(HOPPER, "fp8", _GATED, 96, GemmPlan(64, 64, 128, num_warps=4, num_stages=3, tma=True)),
    Row(HOPPER, "fp8", _PLAIN, 96, GemmPlan(64, 128, 128, num_warps=4, num_stages=3, tma=True)),
    Row(("hopper",), "fp8", OPS, ANY, _WARP_SPECIALIZED),
    Row(HOPPER, "fp8", OPS, ANY, GemmPlan(128, 128, 128, 16, num_warps=8, num_stages=3, tma=True)),
    Row(HOPPER, "dequant", OPS, 16, GemmPlan(16, 64, 128, num_warps=4, num_stages=4)),
    Row(HOPPER, "dequant", OPS, 32, GemmPlan(32, 64, 128, num_warps=4, num_stages=4)),
    Row(HOPPER, "dequant", OPS, 96, GemmPlan(64, 64, 128, num_warps=4, num_stages=3)),
    Row(HOPPER, "dequant", OPS, ANY, GemmPlan(128, 128, 128, 16, num_warps=8, num_stages=3)),
    Row(SMALL, "bf16", OPS, 16, GemmPlan(16, 128, 64, num_stages=4)),
    Row(SMALL, "bf16", OPS, 96, GemmPlan(64, 128, 32, num_stages=4)),
    Row(SMALL, "bf16", OPS, ANY, GemmPlan(128, 128, 32, num_warps=8, num_stages=4)),
    Row(SMALL, "fp8", OPS, 16, GemmPlan(16, 64, 128, num_stages=3)),
    Row(SMALL, "fp8", _GATED, ANY, GemmPlan(64, 32, 128, num_warps=4, num_stages=3)),
    Row(SMALL, "fp8", _PLAIN, ANY, GemmPlan(64, 64, 128, num_warps=8, num_stages=3)),
    Row(SMALL, "dequant", OPS, 16, GemmPlan(16, 64, 128, num_stages=3)),
    Row(SMALL, "dequant", OPS, ANY, GemmPlan(64, 64, 64, num_stages=3)),
    Row(("interpreter",), "bf16", OPS, ANY, GemmPlan(16, 32, 32)),
    Row(("interpreter",), "fp8", OPS, ANY, GemmPlan(16, 32, 128)),
    Row(("interpreter",), "dequant", OPS, ANY, GemmPlan(16, 32, 64)),
)

UNPACKED = ("q4_k", "q6_k")
"""Kinds that take more instructions to dequantize than many rows' products leave room for."""
UNPACK_ROWS = {"linear": 64, "gate_up": 100, "down": 100}
"""Rows (of each expert, on average) from which these are unpacked."""

GEMV = {"int8": GemvInt8Plan(block_n=16, words=128, num_warps=4, num_stages=4)}


def generation(arch: tuple[int, int]) -> str:
    """The class of a compute capability; (0, 0) is the interpreter."""
    major, minor = arch
    if major == 0:
        return "interpreter"
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    if major == 9:
        return "hopper"
    return "blackwell" if major in (10, 11) else "ada"  # consumer Blackwell has 100 KiB, no wgmma


def gemm_plan(
    op: str,
    path: str,
    arch: tuple[int, int],
    rows: float,
    N: int,
    K: int,
    device: str = "",
    warp_specialized: bool = False,
) -> GemmPlan:
    """The plan for ``rows`` rows an expert, a tuned one if this GPU has it.

    Args:
        op: one of ``OPS``.
        path: one of ``PATHS``, or a kind of weights that is dequantized, as tuned lines have it.
        device: the GPU's name, which tuned lines are for.
        warp_specialized: whether ``GemmPlan.warp_specialized`` can run; else plans that ask for it
            are passed over.
    """
    tuned = tuned_plan(op, path, device, rows, N, K)
    if tuned and "cols" not in tuned and (warp_specialized or not tuned.get("warp_specialized")):
        return GemmPlan(**tuned)
    base = path if path in PATHS else "dequant"
    if path in UNPACKED and rows >= UNPACK_ROWS[op]:
        return replace(gemm_plan(op, "bf16", arch, rows, N, K), unpack=True)
    return next(
        row.plan
        for row in TABLE
        if generation(arch) in row.generations
        and row.path == base
        and op in row.ops
        and rows <= row.rows
        and (warp_specialized or not row.plan.warp_specialized)
    )


SHARED = {"hopper": 227, "blackwell": 227, "ampere": 99, "ada": 99}
"""KiB of shared memory a program may have; sm_80 has 163, its relatives 99."""


def fit_stages(plan: GemmPlan, arch: tuple[int, int], step_bytes: int) -> GemmPlan:
    """The plan with as many stages of ``step_bytes`` as fit into shared memory, at least one."""
    limit = 163 if arch == (8, 0) else SHARED.get(generation(arch), 1 << 20)
    num_stages = max(1, min(plan.num_stages, (limit - 3) * 1024 // step_bytes))
    return plan if num_stages == plan.num_stages else replace(plan, num_stages=num_stages)


def split_k(num_ctas: int, K: int, num_sms: int, block_k: int) -> int:
    """Programs to share each tile, so that ``num_sms`` have 4 each: 1, 2, 4, 8 or 16."""
    split = 1
    while split < 16 and num_ctas * split < 3 * num_sms and K // (2 * split) >= 2 * block_k:
        split *= 2
    return split
