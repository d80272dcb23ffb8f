"""Plans of the kernels that dequantize in registers: from shapes, the kind of weights and the SMs.

All were measured on Hopper. One that is launched elsewhere is only slow, never wrong.
"""

from __future__ import annotations

from dataclasses import replace

import triton

from .gemm import DequantPlan, GemvMmaPlan, SkinnyExpertsPlan, SkinnyPlan
from .grouped import UNPACKED


def fine_scales(kind: str, group: int) -> bool:
    """Whether a scale of these weights is for at most 64 inputs."""
    return kind.endswith("_k") or group == 32


def fills(N: int, num_sms: int) -> bool:
    """Whether programs of 16 or 32 rows of the matrix and 4 warps keep every SM busy."""
    return N >= 96 * num_sms


def gemv_mma_plan(kind: str, group: int, N: int, K: int, num_sms: int) -> GemvMmaPlan:
    """The fastest measured at matrices of 1536 to 18432 outputs and 4096 to 18432 inputs on Hopper.

    Where there are many blocks of rows, three programs an SM stay for all of them, or one of
    16 warps, and the inputs are copied to shared memory that often only. Narrow matrices have a
    program for each block: of int4 32 rows, for half as many copies of the inputs, or some less,
    to fill the SMs evenly. Where there is less than one block of 32 rows an SM, warps keep it busy,
    of all kinds: 8 share the inputs of 16 rows.
    """
    fine = kind == "int4" and group == 32  # a load more a step, and registers for it
    k_quant = kind.endswith("_k")
    if fills(N, num_sms):
        if kind == "int8" and group > 32:
            return GemvMmaPlan(16, 16, 3, num_sms, registers=128)
        if kind == "int8":
            return GemvMmaPlan(16, 8, 2, 3 * num_sms)
        if fine:  # unbounded, it takes more registers than are free
            return GemvMmaPlan(16, 4, 3, 3 * num_sms, registers=168)
        if kind == "int4":  # with 168 its loads are in another order: 4 % slower
            return GemvMmaPlan(16, 4, 4, 3 * num_sms, registers=160)
        if k_quant:  # with a step that is not whole, more registers than three programs have
            return GemvMmaPlan(16, 4, 2, 3 * num_sms, registers=168 if K % 512 else 0)
        return GemvMmaPlan(16, 4, 4, 3 * num_sms)
    if N < 32 * num_sms:
        if k_quant:
            ahead = 2 if K <= 8192 else 1
        else:
            ahead = 2 if kind == "int4" and (K > 8192 if fine else K <= 4096) else 3
        return GemvMmaPlan(16, 8, ahead, registers=128)
    if kind == "int4":
        plan = GemvMmaPlan(32, 8, 1, registers=128)
    elif k_quant:
        plan = GemvMmaPlan(16, 4 if kind == "q4_k" or K <= 8192 else 8, 2, registers=128)
    else:
        plan = GemvMmaPlan(16, 4, 4 if K <= 8192 else 3, registers=128)
    return replace(plan, used=_even_rows(plan, N, num_sms))


def _even_rows(plan: GemvMmaPlan, N: int, num_sms: int) -> int:
    """So many of a block's rows that the blocks are whole waves of programs; 0: all, where this
    would leave more than a quarter of the products without use."""
    programs = 65536 // (32 * plan.num_warps * plan.registers) * num_sms
    rounds = triton.cdiv(triton.cdiv(N, plan.rows), programs)
    used = triton.cdiv(N, rounds * programs)
    return used if 4 * used >= 3 * plan.rows else 0


def skinny_plan(kind: str, group: int, M: int, N: int, num_sms: int) -> SkinnyPlan:
    """The fastest measured at matrices [18432, 7168] and [7168, 7168] on Hopper, by kind and rows.

    Narrow matrices have few programs: these get 8 warps. Nibbles in large groups have few bytes a
    row and take 32 rows; the others take 16, and their weights two steps ahead.
    """
    wide = fills(N, num_sms)
    if M > 16:
        return SkinnyPlan(32, 4, 1 if wide else 2)
    if kind == "int4" and (group > 32 or M > 8):
        return SkinnyPlan(32, 4, 1 if M <= 8 else 2) if wide else SkinnyPlan(32, 8)
    chunks = 2 if wide and group == 32 else 1
    return SkinnyPlan(16, 4 if wide else 8, chunks, ahead=2 if M <= 8 else 1)


def skinny_k_quants_plan(kind: str, M: int, N: int, num_sms: int) -> SkinnyExpertsPlan:
    """The fastest measured at matrices [18432, 7168] and [7168, 18432] on Hopper, at one row, which
    is ``gemv_mma``'s now up to 32768 inputs."""
    tokens = 2 if M <= 2 else 4
    if kind == "q4_k":
        return SkinnyExpertsPlan(32 if fills(N, num_sms) else 16, 4, tokens)
    return SkinnyExpertsPlan(16, 4, tokens, chunks=2)


def skinny_experts_plan(kind: str, group: int, rows: float, K: int) -> SkinnyExpertsPlan:
    """The fastest measured at experts of 7168 x 2048 on Hopper, 1 to 32 tokens.

    A warp wants some steps of its own: the fewer inputs, the fewer warps.

    Args:
        rows: of an expert, on average.
        group: of the weights.
    """
    deep = K >= 4096
    tokens = 8 if not fine_scales(kind, group) else 2 if rows <= 2 else 4
    if kind == "q4_k":
        return (
            SkinnyExpertsPlan(16, 2, tokens) if deep else SkinnyExpertsPlan(16, 1, tokens, ahead=2)
        )
    tall = deep or kind == "int4"
    return SkinnyExpertsPlan(
        32 if tall else 16, 4 if deep else 2, tokens, chunks=2 if kind in ("int8", "fp8") else 1
    )


def dequant_plan(kind: str, M: int, N: int, steps: int, num_sms: int) -> DequantPlan:
    """Inputs of 16 to 256 rows a program, fastest measured at four matrices on Hopper.

    Up to 128 rows all steps are shared evenly where that gives each program 16 of them, up to 256
    rows and beyond those of a last round that is less than a third full. Otherwise K is in parts
    where there are few programs.

    Args:
        steps: of 128 inputs.
    """
    cols = next((cols for cols in (16, 32, 64, 128) if M <= cols), 256)
    blocks = triton.cdiv(M, cols)
    if cols < 256:
        even = _even_plan(kind, cols, blocks, N, steps, num_sms)
        return even or _parts_plan(cols, blocks * triton.cdiv(N, 64), steps, num_sms)
    tiles = blocks * triton.cdiv(N, 64)
    if tiles >= 12 * num_sms:  # two warpgroups that share the inputs pay in many rounds
        return DequantPlan(cols, num_warps=8, num_stages=5)
    rounds, rest = divmod(tiles, 2 * num_sms)
    if 1 <= rounds < 4 and 0 < rest <= 2 * num_sms // 3:
        return even_shares(cols, 4, 3, 4, 2, num_sms)
    plan = _parts_plan(cols, tiles, steps, num_sms)
    if tiles <= num_sms and plan.split_k == 1 and steps >= (16 if kind == "int4" else 96):
        return replace(plan, split_k=2)  # two programs an SM
    return plan


def _even_plan(
    kind: str, cols: int, blocks: int, N: int, steps: int, num_sms: int
) -> DequantPlan | None:
    """Even shares of all steps, if they are long enough.

    A step of nibbles is half the bytes, so one program waits for them longer than it dequantizes:
    one more an SM, and shares of six steps, pay too.
    """
    num_warps, num_stages, words, programs = {
        16: (4, 6, 6, 4),
        32: (8, 4, 4, 3),
        64: (4, 4, 4, 3),
        128: (8, 3, 3, 2),
    }[cols]
    least = 16.0
    ctas_per_sm = blocks * triton.cdiv(N, 16 * num_warps) * steps / num_sms
    if kind == "int4" and cols <= 64:
        least = 6.0
        programs = 4 if cols == 64 else programs
        while programs > 2 and ctas_per_sm < 7 * programs:
            programs -= 1
    if not least * programs <= ctas_per_sm < 4 * steps * programs:
        return None
    return even_shares(cols, num_warps, num_stages, words, programs, num_sms)


def even_shares(
    cols: int, num_warps: int, num_stages: int, words: int, programs: int, num_sms: int
) -> DequantPlan:
    """``programs`` programs on each SM, with the registers that this leaves them."""
    registers = 65536 // (32 * num_warps * programs) // 8 * 8
    bound = registers if registers < 256 else 0  # no thread has more
    return DequantPlan(
        cols, num_warps, num_stages, words, num_ctas=programs * num_sms, registers=bound
    )


def _parts_plan(cols: int, num_ctas: int, steps: int, num_sms: int) -> DequantPlan:
    """A program for each tile of 64 outputs, or for a half or a quarter of its steps."""
    if cols == 256:
        plan, programs = DequantPlan(cols, num_stages=3), num_sms
    elif cols == 128:  # two programs an SM, or with a stage less three
        plan, programs = (
            DequantPlan(cols, num_stages=3 if num_ctas > 2 * num_sms else 4),
            2 * num_sms,
        )
    elif cols == 64:
        plan, programs = DequantPlan(cols), 4 * num_sms
    else:
        plan, programs = (
            DequantPlan(cols, num_stages=6, word_stages=6),
            (5 if cols == 16 else 9) * num_sms,
        )
    parts = 1
    while parts < 4 and 2 * parts * num_ctas <= programs and steps >= 8 * parts:
        parts *= 2
    share = triton.cdiv(steps, parts)
    return replace(plan, split_k=triton.cdiv(steps, share))  # no part is empty


def dequant_experts_plan(kind: str, rows: float) -> DequantPlan:
    """Plan of ``dequant_gemm`` for this many rows per expert, on average."""
    cols = next((cols for cols in (16, 32, 64, 128) if rows <= cols), 256)
    if cols == 64 and kind in UNPACKED:
        return DequantPlan(cols, word_stages=3)
    return DequantPlan(cols, num_stages=4 if cols <= 64 else 3)
