"""Experts cut across NUMA nodes: tensor parallelism inside a layer (SOSP'25 section 3.3).

Every expert is split along its intermediate size: gate and up by rows, down by columns. A slice is
an expert of ``I / parts`` on its own, and the slices' outputs add up to the expert's. Cuts lie
between whole blocks of scales, so a slice has the codes and scales of the whole, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import PykernelsError
from ..shapes import ExpertSpec, MoEShape
from .experts import Allocator, Biases, PackedExperts, Packer, check_expert
from .format import Format, Weight
from .layout import K_BLOCK, N_BLOCK


def most_parts(shape: MoEShape, fmt: Format) -> int:
    """Into how many slices the experts of a layer can be cut; ``fmt``: of down."""
    return -(-shape.I // _unit(fmt))


def cut(shape: MoEShape, fmt: Format, parts: int) -> list[range]:
    """The intermediate rows of each slice: whole scale blocks, as even as they go.

    Args:
        fmt: of down, whose inputs they are; as gate's and up's outputs any 128 can be cut off.

    Raises:
        PykernelsError: fewer blocks than parts.
    """
    unit, blocks = _unit(fmt), most_parts(shape, fmt)
    if not 1 <= parts <= blocks:
        raise PykernelsError(
            f"experts of width {shape.I} in {fmt.name} have {blocks} block(s) of {unit}, which"
            f" cannot be split across {parts} NUMA nodes",
            "Use --numa auto or off",
        )
    edges = [min(shape.I, blocks * part // parts * unit) for part in range(parts + 1)]
    return [range(first, last) for first, last in zip(edges, edges[1:], strict=False)]


def take_rows(fmt: Format, weight: Weight, N: int, K: int, rows: range) -> Weight:
    """Rows of a matrix [N, K] that begin and end at scale blocks (or at its end)."""
    if weight.scale is None:
        return Weight(weight.data[rows.start : rows.stop])
    first, last = (_scales(fmt, n, K)[0] for n in (rows.start, rows.stop))
    return Weight(weight.data[rows.start : rows.stop], weight.scale[first:last])


def take_columns(fmt: Format, weight: Weight, N: int, K: int, columns: range) -> Weight:
    """Columns of a matrix [N, K] that begin and end at blocks of the format (or at its end).

    A row of data may be bytes of blocks (K-quants): their number is in proportion to K. Scales that
    do not run along K (one a row) belong to every slice.
    """
    width = weight.data.shape[1]
    data = weight.data[:, columns.start * width // K : columns.stop * width // K]
    if weight.scale is None:
        return Weight(data)
    if not _scales_run_along_k(fmt):
        return Weight(data, weight.scale)
    first, last = (_scales(fmt, N, k)[1] for k in (columns.start, columns.stop))
    return Weight(data, weight.scale[:, first:last])


class SplitExperts:
    """The experts of one layer, packed as one ``PackedExperts`` a slice.

    Attributes:
        shape, fmt, down_fmt: of the whole layer.
        rows: the intermediate rows of each slice.
        slices: the packed slices, ``shape.I`` of each its own.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: Format,
        allocs: Sequence[Allocator],
        packers: Sequence[Packer],
        down_fmt: Format | None = None,
    ) -> None:
        """A slice an allocator (and packer); raises PykernelsError if I has not so many blocks."""
        self.shape, self.fmt, self.down_fmt = shape, fmt, down_fmt or fmt
        self.rows = cut(shape, self.down_fmt, len(allocs))
        self.slices = [
            PackedExperts(replace(shape, I=len(rows)), fmt, alloc, packer, down_fmt)
            for rows, alloc, packer in zip(self.rows, allocs, packers, strict=True)
        ]

    @staticmethod
    def slice_bytes(
        shape: MoEShape, fmt: Format, parts: int, down_fmt: Format | None = None
    ) -> list[int]:
        """Memory of each slice of a layer's experts."""
        return [
            PackedExperts.bytes_needed(replace(shape, I=len(rows)), fmt, down_fmt)
            for rows in cut(shape, down_fmt or fmt, parts)
        ]

    @property
    def spec(self) -> ExpertSpec:
        """What an expert does besides its products."""
        return self.shape.spec

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that one token reads of one expert: weights and scales of all slices."""
        return sum(packed.bytes_per_expert for packed in self.slices)

    def pack(
        self, expert: int, gate: Weight, up: Weight, down: Weight, *, biases: Biases | None = None
    ) -> None:
        """As ``PackedExperts.pack``: whole matrices in, each slice takes its part; the first one
        takes down's bias.

        Raises:
            PykernelsError: as there.
        """
        if len(self.slices) == 1:
            self.slices[0].pack(expert, gate, up, down, biases=biases)
            return
        H, I, fmt, down_fmt = self.shape.H, self.shape.I, self.fmt, self.down_fmt  # noqa: E741
        check_expert(self.shape, (fmt, down_fmt), expert, (gate, up, down), biases)
        for rows, packed in zip(self.rows, self.slices, strict=True):
            own = None
            if biases is not None:
                at = slice(rows.start, rows.stop)
                down_bias = torch.zeros_like(biases.down) if rows.start else biases.down
                own = Biases(biases.gate[at], biases.up[at], down_bias)
            packed.pack(
                expert,
                take_rows(fmt, gate, I, H, rows),
                take_rows(fmt, up, I, H, rows),
                take_columns(down_fmt, down, H, I, rows),
                biases=own,
            )

    def take(self, whole: PackedExperts) -> None:
        """Copies a layer that is packed in one piece: each slice the bytes that ``pack`` would give
        it. Along K a block is a stream of runs of inputs, so a cut of columns is a cut of bytes."""
        down = self.down_fmt
        for rows, own in zip(self.rows, self.slices, strict=True):
            blocks = slice(rows.start // N_BLOCK, -(-rows.stop // N_BLOCK))
            own.gate_up.copy_(whole.gate_up[:, blocks])
            own.gate_up_scale.copy_(whole.gate_up_scale[:, blocks])
            own.gate_up_bias.copy_(whole.gate_up_bias[:, blocks])
            first, last = (down.block_bytes(k) for k in (rows.start, rows.stop))
            own.down.copy_(whole.down[..., first:last])
            first, last = (down.scale_bytes(k) for k in (rows.start, rows.stop))
            if down.scale_bytes(_unit(down)) == down.scale_bytes(2 * _unit(down)):
                first = 0  # one a row
            own.down_scale.copy_(whole.down_scale[..., first:last])
            if not rows.start:
                own.down_bias.copy_(whole.down_bias)
            own.packed = list(whole.packed)

    def some(self, first: int, last: int) -> SplitExperts:
        """Its experts ``first .. last - 1`` as a layer of their own, in the same memory."""
        found = copy.copy(self)
        found.slices = [packed.some(first, last) for packed in self.slices]
        found.shape = replace(found.slices[0].shape, I=self.shape.I)
        return found

    def holds(self, expert: int) -> bool:
        """Whether there is such an expert."""
        return self.slices[0].holds(expert)

    def unpack(self, expert: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert, bit for bit as they were packed."""
        parts = [packed.unpack(expert) for packed in self.slices]
        if len(parts) == 1:
            return parts[0]
        gates, ups, downs = zip(*parts, strict=True)
        shared = not _scales_run_along_k(self.down_fmt)
        return _join(gates, 0), _join(ups, 0), _join(downs, 1, shared)

    def biases(self, expert: int) -> Biases | None:
        """The biases of one expert, float32; None where there are none."""
        parts = [found for packed in self.slices if (found := packed.biases(expert)) is not None]
        if not parts:
            return None
        gates, ups, downs = zip(*parts, strict=True)
        return Biases(torch.cat(gates), torch.cat(ups), downs[0])

    def missing(self) -> list[int]:
        """Experts that were never packed."""
        return self.slices[-1].missing()


def _join(parts: Sequence[Weight], axis: int, shared_scale: bool = False) -> Weight:
    data = torch.cat([part.data for part in parts], axis)
    scales = [part.scale for part in parts if part.scale is not None]
    if not scales:
        return Weight(data)
    return Weight(data, scales[0] if shared_scale else torch.cat(scales, axis))


def _unit(fmt: Format) -> int:
    """Intermediate rows to a multiple of which slices are cut: scale blocks both ways."""
    return max(K_BLOCK, fmt.k_block)


def _scales_run_along_k(fmt: Format) -> bool:
    """Whether more inputs have more scales; if not, there is one for each output."""
    unit = _unit(fmt)
    return fmt.scale_shape(1, unit) != fmt.scale_shape(1, 2 * unit)


def _scales(fmt: Format, N: int, K: int) -> tuple[int, int]:
    """Shape of the scales of a matrix [N, K]; along an empty side there are none."""
    shape = fmt.scale_shape(max(N, 1), max(K, 1))
    assert shape is not None  # the weight has scales
    return shape[0] if N else 0, shape[1] if K else 0


Experts = PackedExperts | SplitExperts
"""A layer's packed experts, in one piece or in slices: ``.slices`` has them."""


def repeat_first(experts: Experts) -> None:
    """Gives every expert the bytes of expert 0: random layers for measurements, quickly."""
    for packed in experts.slices:
        for section in packed.sections:
            section[1:] = section[0]
        packed.packed = [True] * packed.shape.E
