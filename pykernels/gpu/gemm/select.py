"""Which kernel multiplies a linear's rows, and how it is launched: by shapes and the GPU alone.

Decoded weights in bf16 activations, by rows: ``gemv`` (one row of a narrow int8 matrix, where it
beats the tensor cores), ``gemv_mma`` (one row of all else that it takes), ``skinny_linear`` (up to
16, or
32 where nothing faster takes more), ``skinny_experts`` (K-quants, up to 4 or 8), ``dequant_gemm``
(Hopper), and the decoding GEMM, or one of bfloat16 behind ``unpacked``, for all else, which the
interpreter takes too: Gluon kernels have none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from ..common.launch import arch, num_sms
from ..plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
)
from ..plans.grouped import GEMV, UNPACKED, gemm_plan, split_k
from ..plans.tuned import LINEAR_PLANS, tuned_plan
from .gemv_mma import KINDS as ONE_KINDS
from .gemv_mma import MOST_INPUTS
from .grouped import decoded_step, path_of, warp_specialized_takes
from .hopper.dequant import takes as many_takes
from .hopper.linear_fp8 import pays
from .skinny_linear import KINDS as FEW_KINDS
from .weights import Matrices

Plan = GemmPlan | GemvInt8Plan | GemvMmaPlan | SkinnyPlan | SkinnyExpertsPlan | DequantPlan
FEW_ROWS = 32
"""Most rows for which each program reads all inputs itself, and half of it where
``dequant_gemm`` could multiply them too, a quarter of bytes with few scales."""
FEW_K_ROWS = 8
"""The same of K-quants, four at a time."""
MANY_K_ROWS = 1500
"""Most rows for which ``dequant_gemm`` multiplies K-quants and E4M3: more are unpacked."""
UNPACK_E4M3_ROWS = 256
"""Most rows for which the decoding GEMM multiplies E4M3 on Hopper: more are unpacked."""
SPLIT_ROWS = 64
"""Most rows for which the decoding GEMM splits K."""


def fills(N: int, processors: int) -> bool:
    """Whether programs of a few rows of the matrix and 4 warps keep every processor busy."""
    return N >= 96 * processors


def kernel_of(
    kind: str,
    M: int,
    N: int,
    K: int,
    processors: int,
    capability: tuple[int, int],
    many: bool,
    group: int = 128,
) -> str:
    """The op of plans for decoded weights: "gemv", "one", "few", "few_k", "many" or "linear".

    Args:
        many: whether ``dequant_gemm`` has a form for these weights.
        group: inputs that share a scale.
    """
    tensor = kind in FEW_KINDS and capability >= (8, 0)
    many = many and capability[0] == 9
    if M == 1 and kind in GEMV and not (tensor and fills(N, processors)):
        return "gemv"
    if M == 1 and kind in ONE_KINDS and K <= MOST_INPUTS and capability >= (8, 0):
        return "one"
    octets = kind == "int8" and group > 32 and N >= 24 * processors
    if tensor and M <= (FEW_ROWS // (4 if octets else 2) if many else FEW_ROWS):
        return "few"
    if kind in UNPACKED and capability >= (8, 0):
        if M <= (FEW_K_ROWS // 2 if many else FEW_K_ROWS):
            return "few_k"
    if kind in (*UNPACKED, "fp8"):
        many = many and M <= MANY_K_ROWS
    return "many" if many else "linear"


def gemv_mma_plan(kind: str, group: int, N: int, K: int, processors: int) -> GemvMmaPlan:
    """The fastest measured at matrices of 1536 to 18432 outputs and 4096 to 18432 inputs on Hopper.

    Where there are many blocks of rows, three programs a processor stay for all of them, or one of
    16 warps, and the inputs are copied to shared memory that often only. Narrow matrices have a
    program for each block: of int4 32 rows, for half as many copies of the inputs, or some less,
    to fill the places for programs evenly. Where there is less than one block of 32 rows a
    processor, warps keep it busy, of all kinds: 8 share the inputs of 16 rows.
    """
    fine = kind == "int4" and group == 32  # a load more a step, and registers for it
    k_quant = kind.endswith("_k")
    if fills(N, processors):
        if kind == "int8" and group > 32:
            return GemvMmaPlan(16, 16, 3, processors, registers=128)
        if kind == "int8":
            return GemvMmaPlan(16, 8, 2, 3 * processors)
        if fine:  # unbounded, it takes more registers than are free
            return GemvMmaPlan(16, 4, 3, 3 * processors, registers=168)
        if kind == "int4":  # with 168 its loads are in another order: 4 % slower
            return GemvMmaPlan(16, 4, 4, 3 * processors, registers=160)
        if k_quant:  # with a step that is not whole, more registers than three programs have
            return GemvMmaPlan(16, 4, 2, 3 * processors, registers=168 if K % 512 else 0)
        return GemvMmaPlan(16, 4, 4, 3 * processors)
    if N < 32 * processors:
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
    return replace(plan, used=_even_rows(plan, N, processors))


def _even_rows(plan: GemvMmaPlan, N: int, processors: int) -> int:
    """So many of a block's rows that blocks fill whole rounds of places; 0: all, where this would
    leave more than a quarter of the products without use."""
    room = 65536 // (32 * plan.warps * plan.registers) * processors
    rounds = triton.cdiv(triton.cdiv(N, plan.rows), room)
    used = triton.cdiv(N, rounds * room)
    return used if 4 * used >= 3 * plan.rows else 0


def skinny_plan(kind: str, group: int, M: int, N: int, processors: int) -> SkinnyPlan:
    """The fastest measured at matrices [18432, 7168] and [7168, 7168] on Hopper, by kind and rows.

    Narrow matrices have few programs: these get 8 warps. Nibbles in large groups have few bytes a
    row and take 32 rows; the others take 16, and their weights two steps ahead.
    """
    wide = fills(N, processors)
    if M > 16:
        return SkinnyPlan(32, 4, 1 if wide else 2)
    if kind == "int4" and (group > 32 or M > 8):
        return SkinnyPlan(32, 4, 1 if M <= 8 else 2) if wide else SkinnyPlan(32, 8)
    chunks = 2 if wide and group == 32 else 1
    return SkinnyPlan(16, 4 if wide else 8, chunks, ahead=2 if M <= 8 else 1)


def skinny_k_quant_plan(kind: str, M: int, N: int, processors: int) -> SkinnyExpertsPlan:
    """The fastest measured at matrices [18432, 7168] and [7168, 18432] on Hopper, at one row, which
    ``gemv_mma`` takes now up to 32768 inputs."""
    tokens = 2 if M <= 2 else 4
    if kind == "q4_k":
        return SkinnyExpertsPlan(32 if fills(N, processors) else 16, 4, tokens)
    return SkinnyExpertsPlan(16, 4, tokens, chunks=2)


def dequant_plan(kind: str, M: int, N: int, steps: int, processors: int) -> DequantPlan:
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
        even = _even_plan(kind, cols, blocks, N, steps, processors)
        return even or _parts_plan(cols, blocks * triton.cdiv(N, 64), steps, processors)
    tiles = blocks * triton.cdiv(N, 64)
    if tiles >= 12 * processors:  # two warpgroups that share the inputs pay in many rounds
        return DequantPlan(cols, warps=8, stages=5)
    rounds, rest = divmod(tiles, 2 * processors)
    if 1 <= rounds < 4 and 0 < rest <= 2 * processors // 3:
        return even_shares(cols, 4, 3, 4, 2, processors)
    plan = _parts_plan(cols, tiles, steps, processors)
    if tiles <= processors and plan.split_k == 1 and steps >= (16 if kind == "int4" else 96):
        return replace(plan, split_k=2)  # two programs a processor
    return plan


def _even_plan(
    kind: str, cols: int, blocks: int, N: int, steps: int, processors: int
) -> DequantPlan | None:
    """Even shares of all steps, if they are long enough.

    A step of nibbles is half the bytes, so one program waits for them longer than it decodes: one
    more a processor, and shares of six steps, pay too.
    """
    warps, stages, words, room = {
        16: (4, 6, 6, 4),
        32: (8, 4, 4, 3),
        64: (4, 4, 4, 3),
        128: (8, 3, 3, 2),
    }[cols]
    least = 16.0
    total = blocks * triton.cdiv(N, 16 * warps) * steps / processors
    if kind == "int4" and cols <= 64:
        least = 6.0
        room = 4 if cols == 64 else room
        while room > 2 and total < 7 * room:
            room -= 1
    if not least * room <= total < 4 * steps * room:
        return None
    return even_shares(cols, warps, stages, words, room, processors)


def even_shares(
    cols: int, warps: int, stages: int, words: int, room: int, processors: int
) -> DequantPlan:
    """``room`` programs on each processor, with the registers that this leaves them."""
    registers = 65536 // (32 * warps * room) // 8 * 8
    bound = registers if registers < 256 else 0  # no thread has more
    return DequantPlan(cols, warps, stages, words, programs=room * processors, registers=bound)


def _parts_plan(cols: int, programs: int, steps: int, processors: int) -> DequantPlan:
    """A program for each tile of 64 outputs, or for a half or a quarter of its steps."""
    if cols == 256:
        plan, room = DequantPlan(cols, stages=3), processors
    elif cols == 128:  # two programs a processor, or with a stage less three
        plan, room = DequantPlan(cols, stages=3 if programs > 2 * processors else 4), 2 * processors
    elif cols == 64:
        plan, room = DequantPlan(cols), 4 * processors
    else:
        plan, room = (
            DequantPlan(cols, stages=6, word_stages=6),
            (5 if cols == 16 else 9) * processors,
        )
    parts = 1
    while parts < 4 and 2 * parts * programs <= room and steps >= 8 * parts:
        parts *= 2
    share = triton.cdiv(steps, parts)
    return replace(plan, split_k=triton.cdiv(steps, share))  # no part is empty


def select(weight: Matrices, M: int, device: torch.device, activations: str = "bf16") -> Plan:
    """What ``linear`` would launch for M rows."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else ""
    processors = num_sms(device)
    path = path_of(weight, activations == "fp8")
    N, K, kind, capability = weight.N, weight.K, weight.kind, arch(device)
    if path == "decoded":
        op = kernel_of(kind, M, N, K, processors, capability, many_takes(weight), weight.group)
        tuned = tuned_plan(op, kind, name, M, N, K) if op in LINEAR_PLANS else None
        if tuned:
            return LINEAR_PLANS[op](**tuned)
        if op == "gemv":
            return GEMV[kind]
        if op == "one":
            return gemv_mma_plan(kind, weight.group, N, K, processors)
        if op == "few":
            return skinny_plan(kind, weight.group, M, N, processors)
        if op == "few_k":
            return skinny_k_quant_plan(kind, M, N, processors)
        if op == "many":
            return dequant_plan(kind, M, N, triton.cdiv(K, 128), processors)
    key = kind if path == "decoded" else path
    warp_specialized = (
        path == "fp8" and warp_specialized_takes(weight, device) and pays(M, N, K, processors)
    )
    if path == "decoded" and kind == "fp8" and M > UNPACK_E4M3_ROWS and capability[0] == 9:
        return replace(gemm_plan("linear", "bf16", capability, M, N, K), unpack=True)
    plan = gemm_plan("linear", key, capability, M, N, K, name, warp_specialized)
    if path != "decoded" or M > SPLIT_ROWS or plan.split_k > 1 or plan.unpack:
        return plan
    programs = triton.cdiv(N, plan.block_n) * triton.cdiv(M, plan.block_m)
    return replace(plan, split_k=split_k(programs, K, processors, decoded_step(weight, plan)))
