"""The kinds of launch plans of the matrix products: one a kernel, or a family of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import PykernelsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")


def plan_from(kind: type[P], values: Mapping[str, Any]) -> P:
    """The plan of a file's values.

    Raises:
        PykernelsError: a value is not of its field's type, or such a plan cannot be.
        TypeError: a field is not known, or not there.
    """
    for field in fields(kind):
        value = values.get(field.name, field.default)
        if field.name in values and type(value).__name__ != field.type:
            raise PykernelsError(
                f"a plan has {field.name}={value!r}",
                "It is a whole number" if field.type == "int" else "It is true or false",
            )
    return kind(**values)


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


def at_most(most: int, plan: object, *names: str) -> None:
    """Raises PykernelsError for a field of a plan above ``most``."""
    for name in names:
        if getattr(plan, name) > most:
            raise PykernelsError(
                f"a plan has {name}={getattr(plan, name)}", f"Use whole numbers up to {most}"
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
        split_k: programs that share one output tile (linears of few rows, dequantized on the way).
        num_warps, num_stages: Triton's.
        tma: weights (and sorted rows) come by the tensor memory accelerator: sm_90 and above.
        copy: a gated product's rows are first copied into the experts' order, so that they come by
            the accelerator too, in place of being gathered.
        warp_specialized: Hopper's kernel of E4M3, or of bf16 experts, in tiles of 128 rows and 256
            outputs (gated, 128 of each): only ``group_m`` is heeded. Experts' rows are copied into
            their order.
        unpack: weights become bfloat16 in device memory first; the rest is a plan for
            bfloat16.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    copy: bool = False
    warp_specialized: bool = False
    unpack: bool = False

    def __post_init__(self) -> None:
        powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        at_least(16, self, "block_m", "block_n", "block_k")  # of a product's operands
        at_most(256, self, "block_m", "block_n")
        at_most(1024, self, "block_k")
        at_most(32, self, "num_warps")
        at_most(16, self, "num_stages")
        at_most(64, self, "split_k")
        at_most(1 << 16, self, "group_m")  # kernels multiply it by the blocks of N, in 32 bits
        at_least(1, self, "group_m", "split_k", "num_stages")


@dataclass(frozen=True)
class GemvInt8Plan:
    """How a linear of one row is launched.

    Attributes:
        block_n: rows of the matrix a program multiplies.
        words: 32-bit words of each row that it reads at a time.
    """

    block_n: int
    words: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        powers_of_two(self, "block_n", "words", "num_warps")
        at_most(256, self, "block_n")
        at_most(1024, self, "words")
        at_most(32, self, "num_warps")
        _in(self, "num_stages", range(1, 17))


@dataclass(frozen=True)
class GemvMmaPlan:
    """How a linear of one row is launched on the tensor cores.

    Attributes:
        rows: of the matrix a program multiplies, a power of two from 16.
        num_warps: of a program: each takes its part of K. Of K-quants two or more.
        ahead: steps of 64 bytes of codes, of each row and warp, between asking for weights and
            multiplying them.
        num_ctas: at most, each with several blocks of rows if need be; 0: one for each block.
        registers: of a thread, at most; 0: as many as the compiler likes.
        used: of these rows, so that blocks are whole waves of programs; 0: all.
    """

    rows: int
    num_warps: int
    ahead: int = 2
    num_ctas: int = 0
    registers: int = 0
    used: int = 0

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "num_warps")
        at_most(32, self, "num_warps")
        _in(self, "rows", range(16, 257))
        _in(self, "ahead", range(1, 9))
        _in(self, "num_ctas", range(1 << 16))
        _in(self, "registers", (0, *range(64, 256)))
        _in(self, "used", range(self.rows + 1))


@dataclass(frozen=True)
class SkinnyPlan:
    """How a linear of up to 64 rows is launched on the tensor cores, weights in registers.

    Attributes:
        rows: of the matrix a program multiplies, a power of two from 16.
        num_warps: of a program: each takes its part of K.
        chunks: of 64 bytes (groups of 32 inputs: 32) of each row that a warp takes in a step.
        ahead: 1 or 2 steps between asking for weights and multiplying them.
    """

    rows: int
    num_warps: int
    chunks: int = 1
    ahead: int = 1

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "num_warps", "chunks")
        at_most(32, self, "num_warps", "chunks")
        _in(self, "rows", range(16, 257))
        _in(self, "ahead", range(1, 3))


@dataclass(frozen=True)
class SkinnyExpertsPlan:
    """How a product of experts of a few rows each is launched, weights in registers.

    Attributes:
        rows: of the matrices a program multiplies, those of gate and up together.
        num_warps: of a program: each takes its part of K.
        tokens: most rows of the inputs that it multiplies: 8 or more, where a scale is for at most
            64 inputs 2 or more.
        chunks: of 64 bytes of each row (scales for at most 64 inputs: 128) that a warp takes in a
            step.
        ahead: 1 or 2 steps between asking for weights and multiplying them.
    """

    rows: int
    num_warps: int
    tokens: int = 2
    chunks: int = 1
    ahead: int = 1

    def __post_init__(self) -> None:
        powers_of_two(self, "rows", "num_warps", "tokens", "chunks")
        at_most(32, self, "num_warps", "chunks")
        _in(self, "rows", range(16, 129))
        _in(self, "tokens", range(2, 33))
        _in(self, "ahead", range(1, 3))


@dataclass(frozen=True)
class DequantPlan:
    """How a linear of more rows is launched on Hopper, weights dequantized in registers.

    Attributes:
        cols: rows of the inputs a program multiplies by 16 ``num_warps`` rows of the matrix.
        num_stages, word_stages: tiles of 64 inputs and of 16 words of a row in shared memory.
        split_k: programs that share one output tile.
        num_ctas: of a linear: so many have one whole tile after the other and share the last, less
            than one each, evenly; 0: one program for each tile and part.
        registers: of a thread, at most; 0: as many as the compiler likes.
    """

    cols: int
    num_warps: int = 4
    num_stages: int = 4
    word_stages: int = 4
    split_k: int = 1
    num_ctas: int = 0
    registers: int = 0

    def __post_init__(self) -> None:
        powers_of_two(self, "cols")
        _in(self, "cols", range(8, 257))
        _in(self, "num_warps", (4, 8))
        _in(self, "num_stages", range(2, 17))  # the first copies are begun before the loop
        _in(self, "word_stages", range(1, 17))
        _in(self, "split_k", range(1, 65))
        _in(self, "num_ctas", range(1 << 16))
        _in(self, "registers", (0, *range(64, 256)))
        if self.num_ctas and self.split_k > 1:
            raise PykernelsError("a plan has num_ctas and split_k", "Programs share K themselves")


ExpertsPlan = GemmPlan | SkinnyExpertsPlan | DequantPlan
LinearPlan = GemmPlan | GemvInt8Plan | GemvMmaPlan | SkinnyPlan | SkinnyExpertsPlan | DequantPlan
