"""Activation layouts: a buffer's tokens as a kernel reads them, in rows and in A tiles.

A norm writes these layouts and no float tensor (``pykernels.cpu.norm``), so its output exists
packed only; an input of a linear that no norm has written is converted by the first node that reads
it. Which layouts a buffer has follows from the program: from its readers and their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pykernels.cpu.activations.row_layout import row_bytes
from pykernels.cpu.gemm.common import TILE
from pykernels.cpu.moe.kernel import NO_GEMM, Routines, make_routines
from pykernels.cpu.moe.plan import gemm_from_here
from pykernels.quant import get_format
from pykernels.quant.layout import K_BLOCK, ceil_to
from pykernels.registry import resolve
from pykernels.target import detect

from ...machine import tuning
from ...program import Node, Program
from ...program.analysis import ALIGN


@dataclass(frozen=True)
class ActivationLayout:
    """A buffer's rows for one kind of kernel.

    Attributes:
        kernel: one that reads them.
        stride: bytes from one token's row to the next.
        padded: numbers of a row, those that fill up its last block included.
        rows_bytes, tile_bytes: bytes of all rows, and of the GEMM's A tiles of them (0: no tiles).
    """

    kernel: Routines
    stride: int
    padded: int
    rows_bytes: int
    tile_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and the tiles, both aligned to ``ALIGN``."""
        return self.tiles_at + self.tile_bytes

    @property
    def tiles_at(self) -> int:
        """Where the tiles begin behind the rows."""
        return ceil_to(self.rows_bytes, ALIGN)

    @property
    def tile_steps(self) -> int:
        """A tiles of 128 inputs."""
        return 2 if self.kernel.int8 else 4


LayoutKey = tuple[str, bool]
"""What tells apart the layouts of a buffer: the layout of a row, and whether there are A tiles."""


class ActivationLayouts:
    """The layouts of all buffers of a program.

    Args:
        kernel: a backend of ``pykernels.registry``, or "auto".
        gemm_from: tokens from which a matrix goes through the GEMM; None: as this machine was
            calibrated.
    """

    def __init__(self, program: Program, kernel: str, gemm_from: int | None = None) -> None:
        self._program, self._kernel, self._gemm_from = program, kernel, gemm_from
        self.of: dict[str, dict[LayoutKey, ActivationLayout]] = {}
        for node in program.nodes:
            if (reading := self._reading(node)) is None:
                continue
            name, routines, gemm = reading
            key = self.key(name, routines, gemm)
            layouts = self.of.setdefault(name, {})
            if key not in layouts:
                layouts[key] = self._layout(name, routines, key[1])

    def kernel_of(self, fmt: str, activations: str) -> Routines:
        """The compiled routines of a weight format."""
        backend = resolve(self._kernel, fmt, detect(), activations)
        return make_routines(backend.name, fmt, activations)

    def gemm_from(self, kernel: Routines) -> int:
        """Tokens from which a matrix goes through the GEMM."""
        if not kernel.has_gemm:
            return NO_GEMM
        if self._gemm_from is not None:
            return self._gemm_from
        tuned = tuning.gemm_from(kernel.backend, kernel.fmt, kernel.activations)
        return tuned or gemm_from_here(kernel.backend, kernel.fmt, kernel.activations) or NO_GEMM

    def key(self, name: str, kernel: Routines, gemm: bool) -> LayoutKey:
        """The key of the layout in which a kernel reads a buffer.

        Args:
            gemm: whether it reads A tiles, where there are tokens enough.
        """
        how = kernel.row_formats[0]
        layout = f"{'bf16' if how is None else how.name}-{kernel.interleave_a:d}-{kernel.int8:d}"
        return layout, gemm and self.gemm_from(kernel) <= self._program.shape(name)[0]

    def _reading(self, node: Node) -> tuple[str, Routines, bool] | None:
        """The buffer that a node reads as rows, for which kernel, and whether through the GEMM."""
        if node.op == "linear":
            fmt, gemm = self._program.weight(node, "weight").fmt, True
        elif node.op == "moe_ffn":
            fmt, gemm = self._program.weight(node, "experts").fmt, False
        else:
            return None
        return node.inputs["x"], self.kernel_of(fmt, node.attr("activations")), gemm

    def _layout(self, name: str, kernel: Routines, tiles: bool) -> ActivationLayout:
        most, *inner = self._program.shape(name)
        padded = ceil_to(math.prod(inner), get_format(kernel.fmt).k_block)
        stride = row_bytes(padded, kernel.row_formats[0])
        steps = 2 if kernel.int8 else 4
        groups = ceil_to(most, 32) // 16 if tiles else 0
        return ActivationLayout(
            kernel, stride, padded, stride * most, groups * steps * padded // K_BLOCK * TILE
        )


def packed_only(program: Program) -> frozenset[str]:
    """The buffers that are never written as floats: what norms write."""
    return frozenset(node.outputs["out"] for node in program.nodes if node.op == "rms_norm")


def sizes_with_layouts(
    sizes: Mapping[str, int],
    layouts: Mapping[str, Mapping[LayoutKey, ActivationLayout]],
    packed: Sequence[str],
) -> dict[str, int]:
    """Bytes of each buffer's floats (none of ``packed`` ones) and of its layouts behind them."""
    floats = {name: 0 if name in packed else n for name, n in sizes.items()}
    return {
        name: ceil_to(floats.get(name, 0), ALIGN)
        + sum(ceil_to(layout.nbytes, ALIGN) for layout in layouts.get(name, {}).values())
        for name in dict.fromkeys((*floats, *layouts))
    }
