"""The dimensions of a layer and of one call of it, validated once.

Letters used everywhere: ``T`` tokens, ``E`` experts, ``topk`` experts a token takes, ``H`` hidden
size, ``I`` intermediate size of one expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from .errors import PykernelsError


def _number(what: str, value: Any, kind: type) -> int | float:
    """NumPy's numbers as Python's, which kernels are launched with.

    Raises:
        PykernelsError: it is none, or no whole one where ``kind`` is int.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        whole = "whole number" if kind is int else "number"
        raise PykernelsError(f"{what} is {value!r}", f"Give a {whole}")
    return kind(value)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """What an expert does besides its products: ``(up + up_offset) * gate * sigmoid(z)`` with ``z =
    alpha * (gate + cubic * gate**3)``, of gate clamped to at most ``limit`` and up to +- ``limit``.

    The default is ``silu(gate) * up``, SwiGLU (Shazeer 2020); gpt-oss has alpha 1.702, limit 7,
    up_offset 1 and biases; ``GEGLU`` is Gemma's, with the tanh form of GELU.

    Attributes:
        bias: whether gate, up and down have biases, which join before anything else.
    """

    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0
    bias: bool = False
    cubic: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "limit", "up_offset", "cubic"):
            value = float(_number(f"expert {name}", getattr(self, name), float))
            object.__setattr__(self, name, value)
        finite = all(map(math.isfinite, (self.alpha, self.up_offset, self.cubic)))
        if not finite or not self.limit > 0:
            raise PykernelsError(
                f"{self} is no activation", "Use finite numbers, and a limit above 0"
            )

    @property
    def name(self) -> str:
        """Tells it from every other one."""
        cubic = f"-{self.cubic}" if self.cubic else ""
        return f"{self.alpha}-{self.limit}-{self.up_offset}-{self.bias:d}{cubic}"


SWIGLU = ExpertSpec()
GEGLU = ExpertSpec(alpha=math.sqrt(8 / math.pi), cubic=0.044715)
"""``gelu(gate) * up``: ``1 + tanh(z / 2)`` is ``2 * sigmoid(z)`` (Hendrycks and Gimpel 2016)."""


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Sizes of one layer's routed experts.

    An expert is ``down(silu(gate(x)) * up(x))`` with ``gate, up: [I, H]`` and ``down: [H, I]``, or
    what ``spec`` makes of it.
    """

    E: int
    H: int
    I: int  # noqa: E741 - the field's own letter for the intermediate size
    topk: int
    spec: ExpertSpec = field(default=SWIGLU, repr=False)

    def __post_init__(self) -> None:
        for name in ("E", "H", "I", "topk"):
            if not isinstance(size := getattr(self, name), Integral) or size < 1:
                raise PykernelsError(
                    f"MoE shape has {name}={size!r}", f"{name} must be a whole number from 1"
                )
        if self.topk > self.E:
            raise PykernelsError(
                f"MoE shape asks for top-{self.topk} of {self.E} experts", "topk must be at most E"
            )

    @property
    def weights(self) -> int:
        """Weights in one expert: gate, up and down."""
        return 3 * self.H * self.I


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token takes, and how much of each.

    ``ids``: int64 [T, topk], each in ``0..E-1``, no expert twice in a row of it;
    ``weights``: float32 [T, topk].
    """

    ids: torch.Tensor
    weights: torch.Tensor

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.weights.shape:
            raise PykernelsError(
                f"routing ids {tuple(self.ids.shape)} and weights {tuple(self.weights.shape)}"
                " do not match",
                "both must be [T, topk]",
            )

    @property
    def T(self) -> int:
        return self.ids.shape[0]

    @property
    def topk(self) -> int:
        return self.ids.shape[1]

    def distinct_experts(self) -> int:
        """Experts touched at least once: what a call must read from memory."""
        return int(torch.unique(self.ids).numel())


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a router turns logits into experts and their weights.

    A score is the softmax or the sigmoid of the logits. Experts are chosen by score (plus a bias
    that the weights do not see), only among the best ``group_topk`` of ``groups`` equal ranges of
    experts; a group counts as much as its best expert ("max", DeepSeek-V2) or as its two best
    together ("top2", DeepSeek-V3). A weight is its expert's score, divided by the sum of the
    chosen ones if ``renormalize`` (by ``min_sum`` where that is larger: Ernie's moe_norm_min),
    times ``scale`` (routed_scaling_factor). A softmax of the chosen logits alone (gpt-oss) is one
    of all, renormalized.
    """

    topk: int
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    group_topk: int = 1
    group_score: str = "max"
    scale: float = 1.0
    min_sum: float = 0.0

    def __post_init__(self) -> None:
        whole, real = ("topk", "groups", "group_topk"), ("scale", "min_sum")
        for name, kind in (*((n, int) for n in whole), *((n, float) for n in real)):
            object.__setattr__(self, name, _number(f"router {name}", getattr(self, name), kind))
        for name, known in (("scoring", ("softmax", "sigmoid")), ("group_score", ("max", "top2"))):
            if (value := getattr(self, name)) not in known:
                raise PykernelsError(f"router {name} is {value!r}", f"Use {' or '.join(known)}")
        if not 1 <= self.group_topk <= self.groups:
            raise PykernelsError(
                f"a router of {self.groups} groups that takes {self.group_topk} of them",
                "group_topk must be in 1..groups",
            )
        if self.topk < 1:
            raise PykernelsError(f"router topk is {self.topk}", "topk must be at least 1")

    def check(self, E: int) -> None:
        """Raises `PykernelsError` if ``E`` experts cannot be routed so."""
        per = E // self.groups
        if E % self.groups or self.topk > per * self.group_topk:
            raise PykernelsError(
                f"top-{self.topk} of {E} experts in {self.group_topk} of {self.groups} groups",
                "groups must divide the experts, and those taken hold at least topk",
            )
        if self.group_score == "top2" and self.groups > 1 and per < 2:
            raise PykernelsError(
                f"{self.groups} groups of one expert have no two best", 'Use group_score "max"'
            )


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Slots (slot ``t * topk + k`` is token t's k-th expert) ordered by expert, stable by token.

    ``pairs``: int32 [T * topk], the pair at each sorted position; ``starts``: int32 [E + 1], where
    each expert's run begins and the last one ends; ``positions``: int32 [T, topk], the inverse of
    ``pairs``. Pairs of experts outside ``0..E-1`` lie behind ``starts[E]``.
    """

    pairs: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        parts = (
            ("pairs", self.pairs, 1),
            ("starts", self.starts, 1),
            ("positions", self.positions, 2),
        )
        for name, x, ndim in parts:
            if x.ndim != ndim or x.dtype != torch.int32 or not x.is_contiguous():
                raise PykernelsError(
                    f"an order's {name} are {x.dtype} {tuple(x.shape)}",
                    f"make them contiguous int32 of {ndim} dimension{'s' * (ndim > 1)}",
                )
        if self.pairs.numel() != self.positions.numel() or not self.starts.numel():
            raise PykernelsError(
                f"an order of {self.pairs.numel()} pairs, {tuple(self.positions.shape)} positions"
                f" and {self.starts.numel()} starts",
                "there is a position for each slot, and one start more than experts",
            )

    @property
    def topk(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the tokens of a batch lie that are attended together; all contiguous int32 [B].

    Sequence ``b`` has the queries ``q_starts[b] .. + q_lengths[b]`` and the keys
    ``k_starts[b] .. + k_lengths[b]`` of the rows given beside it, or, with a page table, its first
    ``k_lengths[b]`` tokens there. Its queries are the last of its keys. A left-padded batch is one
    whose starts lie behind the padding. Nothing is read from the device to check that.

    Attributes:
        max_queries: no ``q_lengths`` is larger; the launch grid has room for this many.
        page_table: int32 [B, pages].
    """

    q_starts: torch.Tensor
    q_lengths: torch.Tensor
    k_lengths: torch.Tensor
    max_queries: int
    k_starts: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.k_starts is None) == (self.page_table is None):
            raise PykernelsError(
                "keys have a start each or a page table, one of the two",
                "Give k_starts or page_table",
            )
        B = self.q_starts.numel()
        vectors = (self.q_starts, self.q_lengths, self.k_lengths, self.k_starts)
        if any(
            x is not None and (x.shape != (B,) or x.dtype != torch.int32 or not x.is_contiguous())
            for x in vectors
        ):
            raise PykernelsError(
                "starts and lengths do not match", f"all must be contiguous int32 [{B}]"
            )
        table = self.page_table
        if table is not None and (
            table.ndim != 2 or table.shape[0] != B or table.dtype != torch.int32
        ):
            raise PykernelsError(
                f"the page table is {table.dtype} {list(table.shape)}", f"make it int32 [{B}, n]"
            )

    @classmethod
    def cumulative(cls, q_ends: torch.Tensor, k_ends: torch.Tensor, max_queries: int) -> Ragged:
        """From int32 [B + 1] running sums that begin with 0, as varlen attention has them."""
        q_ends, k_ends = q_ends.to(torch.int32), k_ends.to(torch.int32)
        return cls(
            q_starts=q_ends[:-1],
            q_lengths=q_ends.diff(),
            k_starts=k_ends[:-1],
            k_lengths=k_ends.diff(),
            max_queries=max_queries,
        )

    @property
    def B(self) -> int:
        return self.q_starts.shape[0]


@dataclass(frozen=True)
class StateBatch:
    """Where the tokens of sequences lie that have a state each; all contiguous int32 [S].

    Sequence ``s`` has the rows ``starts[s] .. + lengths[s]`` of the tokens given beside it, and the
    state in slot ``slots[s]`` of the buffer given beside that. No two have the same slot. Nothing
    is read from the device to check that.

    Attributes:
        slots: negative: padding, of which nothing is read or written, its rows included.
        past: tokens that the state has seen; 0: it begins as zeros, whatever the slot holds.
        max_length: no ``lengths`` is larger; the launch grid has room for this many.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    past: torch.Tensor
    max_length: int

    def __post_init__(self) -> None:
        S = self.starts.numel()
        vectors = (self.starts, self.lengths, self.slots, self.past)
        if any(x.shape != (S,) or x.dtype != torch.int32 or not x.is_contiguous() for x in vectors):
            raise PykernelsError(
                "starts, lengths, slots and past do not match",
                f"all must be contiguous int32 [{S}]",
            )

    @classmethod
    def decode(cls, slots: torch.Tensor, past: torch.Tensor) -> StateBatch:
        """One token of each sequence, in the order of their rows."""
        rows = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
        return cls(rows, torch.ones_like(rows), slots, past, 1)

    @property
    def S(self) -> int:
        return self.starts.shape[0]
