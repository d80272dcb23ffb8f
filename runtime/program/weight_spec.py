"""What a weight is, before it is read: a program names its weights, and has a spec of each, which
says what it takes of stored tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, get_format
from pykernels.quant.layout import N_BLOCK, ceil_to
from pykernels.quant.split import cut
from pykernels.shapes import MoEShape

KINDS = ("tensor", "matrix", "heads", "experts")
CHANGES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    # The weight of a norm that is stored without its 1.
    "plus one": lambda x: x.float() + 1,
    # A norm's weight that is stored without the factor of its width, 1 / sqrt(H).
    "over root": lambda x: x.float() * x.shape[-1] ** -0.5,
    # A decay's rate, of which the logarithm is stored.
    "minus exp": lambda x: -x.float().exp(),
    # A convolution's, a row for each place of its window: [C, 1, K] -> [K, C].
    "by places": lambda x: x.flatten(1).T,
}
"""What becomes of stored numbers while they are loaded, by ``WeightPart.change``."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A stored tensor in a weight, or some of it.

    Attributes:
        name: name of the model's parameter.
        shape: its shape in the weight, [N, K] of a matrix.
        at: the first row of the weight that is its own.
        rows: runs (first, last) of the stored tensor's rows in the weight's order; empty: all.
        index: the head of a stored [heads, N, K]; None: it is no stack.
        transposed: whether the weight has the rows as its columns.
        change: what the numbers go through, a key of ``CHANGES``; "": nothing.
    """

    name: str
    shape: tuple[int, ...]
    at: int = 0
    rows: tuple[tuple[int, int], ...] = ()
    index: int | None = None
    transposed: bool = False
    change: str = ""


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Says which weight a slice is cut from.

    Attributes:
        first, last: numbers, 32-row blocks of a matrix, or heads ``first .. last - 1``; of experts
            slice ``first`` of ``last`` (``quant.split``).
    """

    full: WeightSpec
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a matrix, numbers of a tensor or heads ``first .. last - 1``, which a shard has from
    ``at`` on."""

    first: int
    last: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """Says what a rank has of a weight, as a weight of its own (``weight_shard``).

    Attributes:
        ranges: in order; of a matrix each is of one part.
        columns: the inputs ``first .. last - 1`` of a matrix; None: all.
    """

    full: WeightSpec
    ranges: tuple[RowRange, ...]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight of a program.

    Attributes:
        name: unique in a model.
        kind: "tensor": plain numbers (norms, biases), float32 to all devices; "matrix": one, or
            several with the same K stacked along N, each from a 32-row block on; "heads": a matrix
            for each head; "experts": the gated MLPs of a layer.
        fmt: of ``pykernels.quant``; of gate and up, where ``down_fmt`` is that of down.
        shape: of a tensor its own; [N, K]; [heads, N, K]; [E, H, I].
        parts: what it is made of; none of routed experts, which a source knows by their name.
        moe: sizes and activation of the experts.
        full: spec of the full layer if this is a subset of its experts; ``expert_ids``: their ids,
            in order (empty: slots that are filled at run time).
        cut: the weight of which it is a slice, in that one's memory; None: it is no slice.
        shard: the weight of which it is a rank's shard; None: it is no shard.
    """

    name: str
    kind: str
    fmt: str
    shape: tuple[int, ...]
    parts: tuple[WeightPart, ...] = ()
    down_fmt: str = ""
    moe: MoEShape | None = None
    full: WeightSpec | None = None
    expert_ids: tuple[int, ...] = ()
    slice_of: WeightSlice | None = None
    shard: Shard | None = None

    @classmethod
    def tensor(cls, name: str, *shape: int, parts: Sequence[WeightPart] = ()) -> WeightSpec:
        """A tensor of that shape, by default the parameter of that name."""
        return cls(name, "tensor", "float32", shape, tuple(parts) or (WeightPart(name, shape),))

    @classmethod
    def matrix(cls, name: str, fmt: str, parts: Sequence[tuple[str, int, int]]) -> WeightSpec:
        """Matrices (parameter, N, K) of one format and one K, stacked."""
        stacked = list[WeightPart]()
        at = 0
        for parameter, N, K in parts:
            stacked.append(WeightPart(parameter, (N, K), at))
            at += ceil_to(N, N_BLOCK)
        N, K = stacked[-1].shape
        assert all(part.shape[1] == K for part in stacked), "one matrix reads the same inputs"
        return cls(name, "matrix", fmt, (stacked[-1].at + N, K), tuple(stacked))

    @classmethod
    def experts(
        cls, name: str, moe: MoEShape, fmt: str, down_fmt: str, parts: Sequence[WeightPart] = ()
    ) -> WeightSpec:
        """A layer's experts."""
        return cls(name, "experts", fmt, (moe.E, moe.H, moe.I), tuple(parts), down_fmt, moe)

    def some(self, expert_ids: Sequence[int]) -> WeightSpec:
        """Some of a layer's experts as a weight of their own, in which they are 0, 1 and so on.

        Raises:
            PykernelsError: an expert that the layer has not, or twice the same one.
        """
        assert self.moe is not None and self.full is None and self.slice_of is None
        E, H, I = self.shape  # noqa: E741
        wrong = [e for e in expert_ids if not 0 <= e < E]
        if wrong or len(set(expert_ids)) < len(expert_ids) or not expert_ids:
            raise PykernelsError(
                f"the experts {', '.join(map(str, expert_ids)) or 'of no number'} of the {E} of"
                f" {self.name}",
                f"Give each of 0 to {E - 1} once at most",
            )
        numbers = tuple(sorted(expert_ids))
        moe = replace(self.moe, E=len(numbers), topk=min(self.moe.topk, len(numbers)))
        name = f"{self.name}[{','.join(map(str, numbers))}]"
        shape = (moe.E, H, I)
        return replace(self, name=name, shape=shape, moe=moe, full=self, expert_ids=numbers)

    def slots(self, count: int) -> WeightSpec:
        """Room for so many of a layer's experts, which nothing is in at first.

        Raises:
            PykernelsError: no slots, or more than the layer has experts.
        """
        assert self.moe is not None and self.full is None and self.slice_of is None
        E, H, I = self.shape  # noqa: E741
        if not 0 < count <= E:
            raise PykernelsError(
                f"{count} slots for the {E} experts of {self.name}", f"Give 1 to {E}"
            )
        moe = replace(self.moe, E=count, topk=min(self.moe.topk, count))
        name = f"{self.name}[{count} slots]"
        return replace(self, name=name, shape=(count, H, I), moe=moe, full=self)

    def part(self, first: int, last: int) -> WeightSpec:
        """The numbers, the 32-row blocks or the heads ``first .. last - 1``."""
        count = last - first
        if self.kind == "matrix":
            count = min(N_BLOCK * last, self.shape[0]) - N_BLOCK * first
        name, cut = f"{self.name}[{first}:{last}]", WeightSlice(self, first, last)
        return replace(self, name=name, shape=(count, *self.shape[1:]), parts=(), slice_of=cut)

    def expert_slices(self, count: int) -> list[WeightSpec]:
        """Experts cut along their intermediate size.

        Raises:
            PykernelsError: they have not so many blocks.
        """
        assert self.moe is not None
        E, H, _ = self.shape
        return [
            replace(
                self,
                name=f"{self.name}[{i}/{count}]",
                shape=(E, H, len(rows)),
                parts=(),
                moe=replace(self.moe, I=len(rows)),
                slice_of=WeightSlice(self, i, count),
            )
            for i, rows in enumerate(cut(self.moe, get_format(self.down_fmt), count))
        ]

    @property
    def is_run(self) -> bool:
        """Whether these are neighbouring experts of ``full``."""
        ids = self.expert_ids
        return bool(ids) and ids == tuple(range(ids[0], ids[0] + len(ids)))

    @property
    def is_expert_slots(self) -> bool:
        """Whether it is expert slots, which are empty at first."""
        return self.full is not None and not self.expert_ids

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of each part of a matrix."""
        return tuple(part.at for part in self.parts)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(N, K) of each part of a matrix, or of each head."""
        return [(part.shape[0], part.shape[1]) for part in self.parts]

    @property
    def nbytes(self) -> int:
        """Bytes in the CPU's layout: those that a step reads of a matrix, all experts of a layer;
        four a number of a tensor."""
        if self.kind == "tensor":
            return 4 * math.prod(self.shape)
        fmt = get_format(self.fmt)
        if self.moe is not None:
            return PackedExperts.bytes_needed(self.moe, fmt, get_format(self.down_fmt))
        *heads, N, K = self.shape
        blocks = math.prod(heads) * (ceil_to(N, N_BLOCK) // N_BLOCK)
        return blocks * (fmt.block_bytes(K) + fmt.scale_bytes(K))

    @property
    def bytes_per_expert(self) -> int:
        """Bytes in the CPU's layout that one token reads of one expert."""
        assert self.moe is not None
        return PackedExperts.expert_bytes(self.moe, get_format(self.fmt), get_format(self.down_fmt))

    def __str__(self) -> str:
        if self.kind != "experts":
            return f"{self.fmt} {list(self.shape)}"
        E, H, I = self.shape  # noqa: E741
        return f"{'/'.join(dict.fromkeys((self.fmt, self.down_fmt)))} {E} x [{I}, {H}]"


def taken(values: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """The rows of a stored tensor that a part takes, in their order."""
    if not part.rows:
        return values
    return torch.cat([values[first:last] for first, last in part.rows])


def part_values(values: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """What a part has of a stored tensor, in the shape and the order of the weight."""
    values = CHANGES[part.change](taken(values, part))
    return (values.T if part.transposed else values).reshape(part.shape).contiguous()


def stored_shape(part: WeightPart) -> tuple[int, ...]:
    """The shape of the tensor that a part is all of."""
    if part.change == "by places":
        K, C = part.shape
        return C, 1, K
    return part.shape
