"""The layouts that checkpoints have for the experts of a block, each found by its names.

Each function returns (gate [I, H], up [I, H], down [H, I]) of every expert, or nothing where a
tensor is missing, which `Names.finish` reports.
"""

from __future__ import annotations

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape

from .names import BLOCK, Names
from .tensors.matrix import Matrix
from .tensors.safetensors import TensorSlice


def separate(names: Names, block: str, shape: MoEShape) -> list[tuple[Matrix, Matrix, Matrix]]:
    experts = []
    H, I = shape.H, shape.I  # noqa: E741
    for e in range(shape.E):
        gate = names.take(f"{block}.{e}.gate_proj.weight", (I, H))
        up = names.take(f"{block}.{e}.up_proj.weight", (I, H))
        down = names.take(f"{block}.{e}.down_proj.weight", (H, I))
        if gate and up and down:
            experts.append((gate, up, down))
    return experts


def stacked(names: Names, block: str, shape: MoEShape) -> list[tuple[Matrix, Matrix, Matrix]]:
    """GGUF's: a tensor [E, N, K] of each projection."""
    E, H, I = shape.E, shape.H, shape.I  # noqa: E741
    stacks = [
        (names.take(f"{block}.{proj}_proj", (E, N, K)), N, K)
        for proj, N, K in (("gate", I, H), ("up", I, H), ("down", H, I))
    ]
    if not all(stack for stack, _, _ in stacks):
        return []
    return [
        tuple(
            Matrix(
                TensorSlice(m.data.name, e),
                (N, K),
                fmt=m.fmt,
                whole=m.whole and TensorSlice(m.whole.name, e),
            )
            for m, N, K in stacks
            if m
        )  # type: ignore[misc]
        for e in range(E)
    ]


def fused(names: Names, block: str, shape: MoEShape) -> list[tuple[Matrix, Matrix, Matrix]]:
    E, H, I = shape.E, shape.H, shape.I  # noqa: E741
    gate_up = names.take(f"{block}.gate_up_proj", (E, 2 * I, H))
    down = names.take(f"{block}.down_proj", (E, H, I))
    if not (gate_up and down):
        return []
    if gate_up.scale and I % BLOCK:
        raise PykernelsError(
            f"{gate_up.data.name} has FP8 blocks that hold both gate and up rows",
            "Get the checkpoint with one tensor an expert",
        )

    def part(matrix: Matrix, e: int, rows: tuple[int, int] | None) -> Matrix:
        blocks = None if rows is None else (rows[0] // BLOCK, rows[1] // BLOCK)
        scale = TensorSlice(matrix.scale.name, e, blocks) if matrix.scale else None
        data = TensorSlice(matrix.data.name, e, rows)
        whole = matrix.whole and TensorSlice(matrix.whole.name, e)
        return Matrix(data, names.checkpoint.shape(data), scale, matrix.fmt, whole=whole)

    return [
        (part(gate_up, e, (0, I)), part(gate_up, e, (I, 2 * I)), part(down, e, None))
        for e in range(E)
    ]


def in_turns(names: Names, block: str, shape: MoEShape) -> list[tuple[Matrix, Matrix, Matrix]]:
    """gpt-oss': transposed, gate and up in turns."""
    E, H, I = shape.E, shape.H, shape.I  # noqa: E741
    gate_up = names.take(f"{block}.gate_up_proj", (E, H, 2 * I))
    down = names.take(f"{block}.down_proj", (E, I, H))
    if not (gate_up and down):
        return []

    def part(matrix: Matrix, e: int, N: int, K: int, pick: int | None = None) -> Matrix:
        return Matrix(TensorSlice(matrix.data.name, e), (N, K), transposed=True, pick=pick)

    return [
        (part(gate_up, e, I, H, 0), part(gate_up, e, I, H, 1), part(down, e, H, I))
        for e in range(E)
    ]


def biases(names: Names, block: str, shape: MoEShape) -> list[tuple[Matrix, Matrix, Matrix]]:
    """A tensor of each projection (GGUF), or of gate and up: one after the other (GGUF), or in
    turns."""
    E, H, I = shape.E, shape.H, shape.I  # noqa: E741

    halves = names.checkpoint.blocks

    def part(matrix: Matrix, e: int, N: int, pick: int | None = None) -> Matrix:
        if halves and pick is not None:
            return Matrix(TensorSlice(matrix.data.name, e, (pick * N, (pick + 1) * N)), (N,))
        return Matrix(TensorSlice(matrix.data.name, e), (N,), pick=pick)

    if f"{block}.gate_proj_bias" in names.stored:
        sizes = {"gate": I, "up": I, "down": H}
        stacks = [(names.take(f"{block}.{p}_proj_bias", (E, N)), N) for p, N in sizes.items()]
        if not all(stack for stack, _ in stacks):
            return []
        return [tuple(part(m, e, N) for m, N in stacks if m) for e in range(E)]  # type: ignore[misc]
    gate_up = names.take(f"{block}.gate_up_proj_bias", (E, 2 * I))
    down = names.take(f"{block}.down_proj_bias", (E, H))
    if not (gate_up and down):
        return []
    return [(part(gate_up, e, I, 0), part(gate_up, e, I, 1), part(down, e, H)) for e in range(E)]
