"""Launch plans of the matrix products, as data: nothing is tuned while a model runs.

A plan is chosen by operation, weight kind, GPU generation, and how many rows an expert (or the
linear) has on average: shapes only, never routing. The first of these that fits is taken: the
``plan=`` argument; a line of ``<cache folder>/gpu-plans.json``, which
``python -m bench.gpu.tune`` writes for this GPU; the table below.

Why the table is as it is (Hopper): a bf16 tile of 128 x 256 reads 48 bytes a cycle from L2 for a
tensor core's full rate, one of 128 x 128 already 64; with up to 64 rows an expert is bound by
reading its weights, so tiles are small and several programs share a processor. A plan that was
measured elsewhere is only slow, never wrong.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..env import env
from ..errors import PykernelsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPS = ("gate_up", "down", "linear")
PATHS = ("bf16", "fp8", "decoded")
"""bf16 and fp8: both operands as they are; decoded: weights become bf16 in registers."""


def powers_of_two(plan: object, *names: str) -> None:
    """Raises PykernelsError unless these fields of a plan are."""
    for name in names:
        value = getattr(plan, name)
        if value < 1 or value & (value - 1):
            raise PykernelsError(f"a plan has {name}={value}", "Tiles and warps are powers of two")


def at_least(least: int, plan: object, *names: str) -> None:
    """Raises PykernelsError for a field of a plan below ``least``."""
    for name in names:
        if getattr(plan, name) < least:
            raise PykernelsError(
                f"a plan has {name}={getattr(plan, name)}", f"Use whole numbers from {least}"
            )


def _in(plan: object, name: str, allowed: Collection[int]) -> None:
    value = getattr(plan, name)
    if value not in allowed:
        raise PykernelsError(
            f"a plan has {name}={value}", f"It is from {min(allowed)} to {max(allowed)}"
        )


@dataclass(frozen=True)
class GemmPlan:
    """How one grouped GEMM or linear is launched.

    Attributes:
        block_m, block_n, block_k: tile of rows, outputs and inputs. Gated in bf16, ``block_n``
            counts gate and up together; in the other paths it is of each.
        group_m: M blocks of one matrix that run side by side before the next N block.
        split_k: programs that share one output tile (linears of few rows).
        warps, stages: of Triton.
        tma: weights (and sorted rows) come by the tensor memory accelerator: sm_90 and above.
        copy: a gated product's rows are first copied into the experts' order, so that they come by
            the accelerator too, in place of being gathered.
        by_hand: the fp8 kernel, or the experts' bf16 kernel, written out for Hopper, of tiles of
            128 rows and 256 outputs (gated, 128 of each): only ``group_m`` is heeded. Experts'
            rows are copied into their order.
        unpack: decoded weights become bfloat16 in device memory first; the rest is a plan for
            bfloat16.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    split_k: int = 1
    warps: int = 4
    stages: int = 3
    tma: bool = False
    copy: bool = False
    by_hand: bool = False
    unpack: bool = False

    def __post_init__(self) -> None:
        powers_of_two(self, "block_m", "block_n", "block_k", "warps")
        at_least(1, self, "group_m", "split_k", "stages")


@dataclass(frozen=True)
class GemvPlan:
    """How a linear of one row is launched.

    Attributes:
        block_n: rows of the matrix a program multiplies.
        words: 32-bit words of each row that it reads at a time.
    """

    block_n: int
    words: int
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        powers_of_two(self, "block_n", "words", "warps")
        _in(self, "stages", range(1, 17))


@dataclass(frozen=True)
class OneRowPlan:
    """How a linear of one row is launched on the tensor cores.

    Attributes:
        rows: of the matrix a program multiplies, a power of two from 16.
        warps: of a program: each takes its part of K.
        ahead: steps of 64 bytes of each row (groups of 32 inputs: 32) between asking for weights
            and multiplying them.
        programs: at most, each with several blocks of rows if need be; 0: one for each block.
        registers: of a thread, at most; 0: as many as the compiler likes.
        chains: of products that wait for each other, for nibbles in groups of more than 32: one a
            step, or one for the lower nibbles and one for the upper.
    """

    rows: int
    warps: int
    ahead: int = 2
    programs: int = 0
    registers: int = 0
    chains: int = 1

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "warps")
        _in(self, "rows", range(16, 257))
        _in(self, "ahead", range(1, 9))
        _in(self, "programs", range(1 << 16))
        _in(self, "registers", (0, *range(64, 256)))
        _in(self, "chains", (1, 2))


@dataclass(frozen=True)
class FewPlan:
    """How a linear of up to 64 rows is launched on the tensor cores, weights in registers.

    Attributes:
        rows: of the matrix a program multiplies, a power of two from 16.
        warps: of a program: each takes its part of K.
        chunks: of 64 bytes (groups of 32 inputs: 32) of each row that a warp takes in a step.
        ahead: 1 or 2 steps between asking for weights and multiplying them.
    """

    rows: int
    warps: int
    chunks: int = 1
    ahead: int = 1

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "warps", "chunks")
        _in(self, "rows", range(16, 257))
        _in(self, "ahead", range(1, 3))


@dataclass(frozen=True)
class ExpertsPlan:
    """How a product of experts of a few rows each is launched, weights in registers.

    Attributes:
        rows: of the matrices a program multiplies, those of gate and up together.
        warps: of a program: each takes its part of K.
        tokens: most rows of the inputs that it multiplies: 8 or more, where a scale is for at most
            64 inputs 2 or more.
        chunks: of 64 bytes of each row (scales for at most 64 inputs: 128) that a warp takes in a
            step.
        ahead: 1 or 2 steps between asking for weights and multiplying them.
    """

    rows: int
    warps: int
    tokens: int = 2
    chunks: int = 1
    ahead: int = 1

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "warps", "tokens", "chunks")
        _in(self, "rows", range(16, 129))
        _in(self, "tokens", range(2, 33))
        _in(self, "ahead", range(1, 3))


@dataclass(frozen=True)
class ManyPlan:
    """How a linear of more rows is launched on Hopper, weights decoded in registers.

    Attributes:
        cols: rows of the inputs a program multiplies by 16 ``warps`` rows of the matrix.
        stages, word_stages: tiles of 64 inputs and of 16 words of a row in shared memory.
        split_k: programs that share one output tile.
    """

    cols: int
    warps: int = 4
    stages: int = 4
    word_stages: int = 4
    split_k: int = 1

    def __post_init__(self) -> None:
        powers_of_two(self, "cols")
        _in(self, "cols", range(8, 257))
        _in(self, "warps", (4, 8))
        _in(self, "stages", range(2, 17))  # the first copies are begun before the loop
        _in(self, "word_stages", range(1, 17))
        _in(self, "split_k", range(1, 65))


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
_BY_HAND = GemmPlan(128, 128, 128, 4, by_hand=True)
_BF16_LARGE = GemmPlan(128, 256, 64, 16, warps=8, stages=4, tma=True)

TABLE = (
    Row(HOPPER, "bf16", OPS, 16, GemmPlan(16, 128, 128, warps=4, stages=4, tma=True)),
    Row(HOPPER, "bf16", OPS, 32, GemmPlan(32, 128, 128, warps=4, stages=3, tma=True)),
    Row(HOPPER, "bf16", OPS, 96, GemmPlan(64, 128, 64, 8, warps=4, stages=4, tma=True)),
    Row(HOPPER, "bf16", OPS, 192, _BF16_LARGE),
    Row(("hopper",), "bf16", ("down",), ANY, _BY_HAND),
    Row(HOPPER, "bf16", OPS, ANY, _BF16_LARGE),
    Row(HOPPER, "fp8", OPS, 32, GemmPlan(32, 64, 128, warps=4, stages=4, tma=True)),
    Row(HOPPER, "fp8", _GATED, 96, GemmPlan(64, 64, 128, warps=4, stages=3, tma=True)),
    Row(HOPPER, "fp8", _PLAIN, 96, GemmPlan(64, 128, 128, warps=4, stages=3, tma=True)),
    Row(("hopper",), "fp8", OPS, ANY, _BY_HAND),
    Row(HOPPER, "fp8", OPS, ANY, GemmPlan(128, 128, 128, 16, warps=8, stages=3, tma=True)),
    Row(HOPPER, "decoded", OPS, 16, GemmPlan(16, 64, 128, warps=4, stages=4)),
    Row(HOPPER, "decoded", OPS, 32, GemmPlan(32, 64, 128, warps=4, stages=4)),
    Row(HOPPER, "decoded", OPS, 96, GemmPlan(64, 64, 128, warps=4, stages=3)),
    Row(HOPPER, "decoded", OPS, ANY, GemmPlan(128, 128, 128, 16, warps=8, stages=3)),
    Row(SMALL, "bf16", OPS, 16, GemmPlan(16, 128, 64, stages=4)),
    Row(SMALL, "bf16", OPS, 96, GemmPlan(64, 128, 32, stages=4)),
    Row(SMALL, "bf16", OPS, ANY, GemmPlan(128, 128, 32, warps=8, stages=4)),
    Row(SMALL, "fp8", OPS, 16, GemmPlan(16, 64, 128, stages=3)),
    Row(SMALL, "fp8", _GATED, ANY, GemmPlan(64, 32, 128, warps=4, stages=3)),
    Row(SMALL, "fp8", _PLAIN, ANY, GemmPlan(64, 64, 128, warps=8, stages=3)),
    Row(SMALL, "decoded", OPS, 16, GemmPlan(16, 64, 128, stages=3)),
    Row(SMALL, "decoded", OPS, ANY, GemmPlan(64, 64, 64, stages=3)),
    Row(("interpreter",), "bf16", OPS, ANY, GemmPlan(16, 32, 32)),
    Row(("interpreter",), "fp8", OPS, ANY, GemmPlan(16, 32, 128)),
    Row(("interpreter",), "decoded", OPS, ANY, GemmPlan(16, 32, 64)),
)

UNPACKED = ("q4_k", "q6_k")
"""Kinds whose decoding has more instructions than many rows' products leave room for."""
UNPACK_ROWS = {"linear": 64, "gate_up": 100, "down": 100}
"""Rows (of each expert, on average) from which these are unpacked."""

GEMV = {"int8": GemvPlan(block_n=16, words=128, warps=4, stages=4)}


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
    by_hand: bool = False,
) -> GemmPlan:
    """The plan for ``rows`` rows an expert, a tuned one if this GPU has it.

    Args:
        op: one of ``OPS``.
        path: one of ``PATHS``, or a kind of weights that is decoded: the kind of tuned lines.
        device: the GPU's name, which tuned lines are for.
        by_hand: whether ``GemmPlan.by_hand`` can run; else plans that ask for it are passed over.
    """
    tuned = tuned_plan(op, path, device, rows, N, K)
    if tuned and "cols" not in tuned and (by_hand or not tuned.get("by_hand")):
        return GemmPlan(**tuned)
    base = path if path in PATHS else "decoded"
    if path in UNPACKED and rows >= UNPACK_ROWS[op]:
        return replace(gemm_plan(op, "bf16", arch, rows, N, K), unpack=True)
    return next(
        row.plan
        for row in TABLE
        if generation(arch) in row.generations
        and row.path == base
        and op in row.ops
        and rows <= row.rows
        and (by_hand or not row.plan.by_hand)
    )


SHARED = {"hopper": 227, "blackwell": 227, "ampere": 99, "ada": 99}
"""KiB of shared memory a program may have; sm_80 has 163, its relatives 99."""


def fit_stages(plan: GemmPlan, arch: tuple[int, int], step_bytes: int) -> GemmPlan:
    """The plan with as many stages of ``step_bytes`` as fit into shared memory, at least one."""
    limit = 163 if arch == (8, 0) else SHARED.get(generation(arch), 1 << 20)
    stages = max(1, min(plan.stages, (limit - 3) * 1024 // step_bytes))
    return plan if stages == plan.stages else replace(plan, stages=stages)


def split_k(programs: int, K: int, processors: int, block_k: int) -> int:
    """Programs to share each tile, so that ``processors`` have 4 each: 1, 2, 4, 8 or 16."""
    split = 1
    while split < 16 and programs * split < 3 * processors and K // (2 * split) >= 2 * block_k:
        split *= 2
    return split


LINEAR_PLANS: dict[str, type[GemvPlan | OneRowPlan | FewPlan | ManyPlan | ExpertsPlan]] = {
    "gemv": GemvPlan,
    "one": OneRowPlan,
    "few": FewPlan,
    "few_k": ExpertsPlan,
    "many": ManyPlan,
}
"""By the op of tuned lines."""
EXPERTS_PLANS = {"few_gate_up": ExpertsPlan, "few_down": ExpertsPlan}
"""The same; all others hold a GemmPlan or, of experts, a ManyPlan."""

# Tuned plans: {"device": name, "op", "path", "rows", "N", "K", "plan": {...}} a line of a list.


def _file() -> Path:
    return env.cache_dir / "gpu-plans.json"


def tuned_plan(
    op: str, path: str, device: str, rows: float, N: int, K: int
) -> dict[str, Any] | None:
    """The plan's fields in the line of this shape with the nearest number of rows, up to 1.5 times
    more or fewer."""
    same = [
        line
        for line in _file_lines(str(_file()))
        if (line["op"], line["path"], line["device"]) == (op, path, device)
        and (line["N"], line["K"]) == (N, K)
    ]
    away = {i: max(line["rows"] / rows, rows / line["rows"]) for i, line in enumerate(same) if rows}
    nearest = min(away, key=away.__getitem__, default=None)
    return None if nearest is None or away[nearest] > 1.5 else same[nearest]["plan"]


@functools.cache
def _file_lines(path: str) -> tuple[dict[str, Any], ...]:
    """Read once a process. Raises PykernelsError: the file is damaged."""
    file = Path(path)
    if not file.exists():
        return ()
    try:
        lines = json.loads(file.read_text())
        for line in lines:
            kinds = {**LINEAR_PLANS, **EXPERTS_PLANS}
            other = ManyPlan if "cols" in line["plan"] else GemmPlan
            kinds.get(line["op"], other)(**line["plan"])
            if not line["rows"] > 0 or {"device", "path", "N", "K"} - line.keys():
                raise ValueError(f"what the plan of {line['op']} is for is not said")
        return tuple(lines)
    except (PykernelsError, ValueError, KeyError, TypeError, OSError) as error:
        raise PykernelsError(
            f"{file} cannot be read: {error}", "Delete it, or run python -m bench.gpu.tune again"
        ) from None


def write_tuned(
    device: str, op: str, path: str, rows: float, N: int, K: int, plan: DataclassInstance
) -> Path:
    """Puts a tuned plan into the file, in the place of an older one; returns the file's path.

    Raises:
        PykernelsError: the file cannot be written, or the one that is there cannot be read.
    """
    key = {"device": device, "op": op, "path": path, "rows": rows, "N": N, "K": K}
    kept = [line for line in _file_lines(str(_file())) if any(line[k] != key[k] for k in key)]
    file = _file()
    whole = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps([*kept, {**key, "plan": asdict(plan)}], indent=1) + "\n")
        whole.replace(file)
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be written: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may write to",
        ) from None
    _file_lines.cache_clear()
    return file
