"""Rows, columns, heads or numbers of a weight as a weight of its own: what one rank has of it; of
experts a run of their intermediate size.

A shard is read from where the whole is stored, in its format and with its scales, so that each
device makes its own layout of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import Biases, Format, Weight, get_format
from pykernels.quant.layout import N_BLOCK

from .weight_spec import RowRange, Shard, WeightPart, WeightSpec

Expert = tuple[tuple[Weight, Weight, Weight], Biases | None]
"""(gate [I, H], up [I, H], down [H, I]) and their biases."""
_BLOCKS = (32, 64, 128, 256)
"""Rows or inputs that may share a scale."""


def shard_of(
    spec: WeightSpec, ranges: Sequence[RowRange], columns: tuple[int, int] | None = None
) -> WeightSpec:
    """Some rows, heads or numbers of a weight, and of a matrix some columns.

    Args:
        ranges, columns: see ``Shard``.

    Raises:
        PykernelsError: a matrix would be cut inside a block of its format.
    """
    assert spec.slice_of is None and spec.full is None and spec.shard is None
    label = ",".join(f"{run.first}:{run.last}" for run in ranges)
    if columns is not None:
        label += f"; {columns[0]}:{columns[1]}"
    end = max(run.at + run.last - run.first for run in ranges)
    shard = Shard(spec, tuple(ranges), columns)
    result = replace(spec, name=f"{spec.name}[{label}]", parts=(), shard=shard)
    if spec.moe is not None:
        assert columns is None and len(ranges) == 1
        E, H, I = spec.shape  # noqa: E741
        span = ranges[0].first, ranges[0].last
        _check_cut(spec.fmt, f"gate and up of {spec.name}", span, (0, H))
        _check_cut(spec.down_fmt, f"down of {spec.name}", (0, H), span)
        return replace(result, shape=(E, H, end), moe=replace(spec.moe, I=end))
    if spec.kind != "matrix":
        parts = [part for p in ranges for part in spec.parts[p.first : p.last]]
        shape = end, *spec.shape[1:]
        return replace(result, shape=shape, parts=tuple(parts) if spec.kind == "heads" else ())
    first, last = columns or (0, spec.shape[1])
    with_parts = [(run, _part(spec, run)) for run in ranges]
    for run, part in with_parts:
        rows = run.first - part.at, run.last - part.at
        _check_cut(spec.fmt, part.name, rows, (first, last))
    made = (WeightPart(part.name, (p.last - p.first, last - first), p.at) for p, part in with_parts)
    return replace(result, shape=(end, last - first), parts=tuple(made))


def tensor_shard(spec: WeightSpec, whole: torch.Tensor) -> torch.Tensor:
    """The shard of a tensor; zeros between its ranges."""
    assert spec.shard is not None
    out = whole.new_zeros(spec.shape)
    for run in spec.shard.ranges:
        out[run.at : run.at + run.last - run.first] = whole[run.first : run.last]
    return out


def matrix_shards(spec: WeightSpec, whole: Iterable[Weight]) -> Iterator[Weight]:
    """The parts of the shard of a matrix, or its heads, in its format.

    Args:
        whole: the parts, or the heads, of the whole.
    """
    assert spec.shard is not None
    ranges, fmt = list(spec.shard.ranges), get_format(spec.fmt)
    if spec.kind == "heads":
        (run,) = ranges
        yield from islice(whole, run.first, run.last)
        return
    for part, weight in zip(spec.shard.full.parts, whole, strict=True):
        columns = spec.shard.columns or (0, part.shape[1])
        while ranges and _part(spec.shard.full, ranges[0]) == part:
            run = ranges.pop(0)
            yield _taken(fmt, weight, (run.first - part.at, run.last - part.at), columns)
        if not ranges:
            return


def _part(spec: WeightSpec, run: RowRange) -> WeightPart:
    return next(
        part for part in spec.parts if part.at <= run.first and run.last <= part.at + part.shape[0]
    )


def _taken(fmt: Format, weight: Weight, rows: tuple[int, int], columns: tuple[int, int]) -> Weight:
    """Rows and columns of a matrix, with their scales."""
    at = slice(*rows), slice(*(fmt.data_shape(1, k)[1] for k in columns))
    data = weight.data.view(torch.uint8) if fmt.name.startswith("fp8") else weight.data
    data = data[at].contiguous().view(weight.data.dtype)
    if weight.scale is None:
        return Weight(data)
    n_block, k_block = _scale_blocks(fmt)
    scale = weight.scale[rows[0] // n_block : -(-rows[1] // n_block)]
    if k_block:
        each = _scales(fmt, 1, k_block)[1]
        scale = scale[:, each * (columns[0] // k_block) : each * -(-columns[1] // k_block)]
    return Weight(data, scale.contiguous())


def expert_shards(spec: WeightSpec, whole: Iterable[Expert]) -> Iterator[Expert]:
    """A run of each expert's intermediate numbers; the first run has the bias of down."""
    assert spec.shard is not None and spec.shard.full.moe is not None
    ((first, last),) = ((run.first, run.last) for run in spec.shard.ranges)
    H, fmt, down_fmt = spec.shape[1], get_format(spec.fmt), get_format(spec.down_fmt)
    for (gate, up, down), biases in whole:
        own = (
            _taken(fmt, gate, (first, last), (0, H)),
            _taken(fmt, up, (first, last), (0, H)),
            _taken(down_fmt, down, (0, H), (first, last)),
        )
        if biases is not None:
            down_bias = torch.zeros_like(biases.down) if first else biases.down
            biases = Biases(biases.gate[first:last], biases.up[first:last], down_bias)
        yield own, biases


def row_unit(name: str) -> int:
    """Rows of a matrix of that format to a multiple of which it is cut: blocks of the tiles, and of
    scales."""
    fmt = get_format(name)
    return max(N_BLOCK, 1 if fmt.scale_shape(1, 256) is None else _scale_blocks(fmt)[0])


def input_unit(name: str) -> int:
    """Columns of a matrix of that format to a multiple of which it is cut."""
    fmt = get_format(name)
    shared = 0 if fmt.scale_shape(1, 256) is None else _scale_blocks(fmt)[1]
    return max(N_BLOCK, fmt.k_multiple, shared)


def _check_cut(name: str, what_of: str, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    fmt = get_format(name)
    n_block, k_block = (1, 0) if fmt.scale_shape(1, 256) is None else _scale_blocks(fmt)
    fits = _in_blocks(rows, n_block) and _in_blocks(columns, k_block)
    if not fits or any(k % fmt.k_multiple for k in columns):
        block = n_block if not _in_blocks(rows, n_block) else max(k_block, fmt.k_multiple)
        what = "rows" if not _in_blocks(rows, n_block) else "inputs"
        first, last = rows if what == "rows" else columns
        raise PykernelsError(
            f"{what} {first} to {last} of {what_of} cut through a block of {block} in {name}",
            "Use fewer ranks, or weights in another format",
        )


def _in_blocks(span: tuple[int, int], block: int) -> bool:
    """Whether a span begins with a block, or lies in one."""
    first, last = span
    return not block or first % block == 0 or first // block == (last - 1) // block


def _scale_blocks(fmt: Format) -> tuple[int, int]:
    """Rows and inputs that share a scale; 0 inputs: all of a row."""
    rows = 1 if _scales(fmt, 2, 1)[0] == 2 else next(n for n in _BLOCKS if _ends(fmt, n, 0))
    return rows, next((k for k in _BLOCKS if _ends(fmt, k, 1)), 0)


def _ends(fmt: Format, size: int, axis: int) -> bool:
    """Whether a new scale begins after so many rows or inputs."""
    one, more = (_scales(fmt, *((n, 1) if axis == 0 else (1, n)))[axis] for n in (size, size + 1))
    return more > one


def _scales(fmt: Format, N: int, K: int) -> tuple[int, int]:
    shape = fmt.scale_shape(N, K)
    assert shape is not None
    return shape
