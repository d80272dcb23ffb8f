"""Tensor-parallel attention (Megatron-LM, arXiv 1909.08053, section 3): each rank has some heads.

The projections of queries, keys and values are cut by rows, the output projection by columns, and
its results are summed over the ranks. A rank's cache holds its own heads of keys and values; a
latent, which all heads share, lies on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pykernels.errors import PykernelsError
from pykernels.quant.layout import N_BLOCK, ceil_to

from ...program import Buffer, Node, Program
from ...program.weight_shard import shard_of
from ...program.weight_spec import RowRange, WeightSpec
from ..layers import rebuilt

_WRITES = ("gqa_rope_cache_write", "mla_rope_cache_write")
_OF_HEADS = ("attention", "attention_expanded", "per_head_linear")


@dataclass(frozen=True)
class Heads:
    """The heads of a rank: queries ``first .. last - 1``, keys ``kv_first .. kv_last - 1``."""

    first: int
    last: int
    kv_first: int
    kv_last: int


def heads_of(rank: int, ranks: int, NH: int, KVH: int) -> Heads:
    """A rank's share, as even as it goes. Where there are fewer heads of keys than ranks, some
    ranks have the same one, and share the queries that read it.

    Raises:
        PykernelsError: more ranks than heads of queries.
    """
    if ranks > NH:
        raise PykernelsError(f"{ranks} ranks for {NH} heads", f"Use at most {NH} ranks")
    group_size = NH // KVH
    if KVH >= ranks:
        first, last = (KVH * r // ranks for r in (rank, rank + 1))
        return Heads(first * group_size, last * group_size, first, last)
    owner = [r * KVH // ranks for r in range(ranks)]
    kv, sharing = owner[rank], owner.count(owner[rank])
    if sharing > group_size:
        raise PykernelsError(
            f"{sharing} ranks for the {group_size} heads of queries that read one of {KVH} of keys",
            "Use fewer ranks",
        )
    place = rank - owner.index(kv)
    first, last = (kv * group_size + group_size * i // sharing for i in (place, place + 1))
    return Heads(first, last, kv, kv + 1)


def cut_heads(program: Program, rank: int, ranks: int) -> Program:
    """The program with a rank's heads of attention, whose results are summed over the ranks.

    Raises:
        PykernelsError: more ranks than heads; a norm over all heads of a token; a matrix would be
            cut inside a block of its format.
    """
    cut = _Cut(program, rank, ranks)
    for node in program.nodes:
        if node.op in _WRITES:
            cut.layer(node)
    nodes = [new for node in program.nodes for new in cut.replaced.get(node.name, (node,))]
    weights = {**program.weights, **cut.weights}
    return rebuilt(replace(program, weights=weights, rank=rank), nodes, cut.buffers)


class _Cut:
    """What takes the place of a program's attention on a rank.

    Attributes:
        replaced: by a node's name. buffers, weights: that are another or new.
    """

    def __init__(self, program: Program, rank: int, ranks: int) -> None:
        self._program, self._rank, self._ranks = program, rank, ranks
        self.replaced: dict[str, tuple[Node, ...]] = {}
        self.buffers: dict[str, Buffer] = {}
        self.weights: dict[str, WeightSpec] = {}

    def layer(self, write: Node) -> None:
        """Cuts the layer of this write to the cache."""
        nodes = [
            node
            for node in self._program.nodes
            if (node.layer, node.microbatch, node.role)
            == (write.layer, write.microbatch, "attention")
        ]
        heads = self._latent(write) if write.op.startswith("mla") else self._grouped(write)
        NH, count = write.attr("heads"), heads.last - heads.first
        self._narrow(write.outputs["rotated"], NH, count)
        for node in nodes:
            if node.op in _OF_HEADS:
                attrs: dict[str, Any] = {"heads": count} if "heads" in node.attrs else {}
                if "k" in node.inputs:
                    attrs["kv_heads"] = heads.kv_last - heads.kv_first
                self._replace(
                    node, self._shards(node, [RowRange(heads.first, heads.last)]), **attrs
                )
                self._narrow(node.outputs["out"], NH, count)
        self._sum(nodes, NH, heads)

    def _grouped(self, write: Node) -> Heads:
        NH, cache = write.attr("heads"), self._program.buffers[write.inputs["k"]]
        KVH, D = (int(dim) for dim in cache.shape[2:])
        own_heads = heads_of(self._rank, self._ranks, NH, KVH)
        for port in write.weights:
            if self._program.weight(write, port).shape[0] != D:
                raise PykernelsError(
                    f"{write.weights[port]} is a norm over all heads, which {self._ranks} ranks"
                    " have some of each",
                    "Use one rank",
                )
        k, v = write.attr("k_start"), write.attr("v_start")
        keys = own_heads.kv_first * D, own_heads.kv_last * D
        spans = [
            (own_heads.first * D, own_heads.last * D),
            *((at + keys[0], at + keys[1]) for at in (k, v)),
        ]
        _, k_start, v_start = self._columns(write.inputs["qkv"], spans)
        count = own_heads.last - own_heads.first
        self._replace(write, {}, heads=count, k_start=k_start, v_start=v_start)
        for port in ("k", "v", "k_scale", "v_scale"):
            if port in write.inputs:
                name = write.inputs[port]
                pages, page, _, *rest = self._program.buffers[name].shape
                self._shape(name, pages, page, own_heads.kv_last - own_heads.kv_first, *rest)
        return own_heads

    def _latent(self, write: Node) -> Heads:
        NH = write.attr("heads")
        own_heads = heads_of(self._rank, self._ranks, NH, NH)
        count = own_heads.last - own_heads.first
        L = self._program.weight(write, "kv_norm").shape[0]
        half = self._program.buffers[write.inputs["angles"]].shape[2]
        rope = 2 * int(half)
        D, q, kv = write.attr("nope") + rope, write.inputs["q"], write.inputs["kv"]
        spans, start = [(own_heads.first * D, own_heads.last * D)], write.attr("kv_start")
        if q == kv:
            spans.append((start, start + L + rope))
        starts = self._columns(q, spans)
        self._replace(write, {}, heads=count, kv_start=starts[1] if q == kv else start)
        return own_heads

    def _columns(self, name: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Has the linears that write a buffer compute some of its columns alone.

        Args:
            spans: first and end of those of one projection each, in order.

        Returns:
            where each span begins now, at a 32-row block.
        """
        starts, end = list[int](), 0
        for first, last in spans:
            starts.append(ceil_to(end, N_BLOCK))
            end = starts[-1] + last - first
        is_first = True
        for node in self._program.nodes:
            if name not in node.writes:
                continue
            begin, spec = node.attr("start"), self._program.weight(node, "weight")
            columns = [
                (first - begin, last - begin, at)
                for (first, last), at in zip(spans, starts, strict=True)
                if begin <= first and last <= begin + spec.shape[0]
            ]
            if not columns:
                self.replaced[node.name] = ()
                continue
            base = columns[0][2]
            ranges = [RowRange(first, last, at - base) for first, last, at in columns]
            shards = self._shards(node, ranges)
            others = {port: read for port, read in node.inputs.items() if port != "out"}
            inputs = others if is_first else {**others, "out": name}
            self._replace(node, shards, inputs, start=base)
            is_first = False
        self._shape(name, self._program.buffers[name].shape[0], end)
        return starts

    def _shards(self, node: Node, ranges: Sequence[RowRange]) -> dict[str, WeightSpec]:
        return {port: shard_of(self._program.weight(node, port), ranges) for port in node.weights}

    def _sum(self, nodes: Sequence[Node], NH: int, heads: Heads) -> None:
        """The output projection of a rank's heads, and the sum of all ranks' results."""
        read = next(n for n in reversed(nodes) if n.op in _OF_HEADS).outputs["out"]
        (linear,) = (node for node in nodes if node.op == "linear" and read in node.reads)
        spec, out = self._program.weight(linear, "weight"), linear.outputs["out"]
        head_columns = spec.shape[1] // NH
        ranges = [RowRange(part.at, part.at + part.shape[0], part.at) for part in spec.parts]
        shard = shard_of(spec, ranges, (heads.first * head_columns, heads.last * head_columns))
        part = f"{out}.rank{self._rank}"
        self.buffers[part] = replace(self._program.buffers[out], name=part)
        weights = {"weight": shard.name}
        if "bias" in linear.weights and self._rank == 0:  # it is added once
            weights["bias"] = linear.weights["bias"]
        self.weights[shard.name] = shard
        partial = replace(linear, outputs={"out": part}, weights=weights)
        self.replaced[linear.name] = (partial, all_reduced(linear, part, out, self._ranks))

    def _replace(
        self,
        node: Node,
        shards: Mapping[str, WeightSpec],
        inputs: Mapping[str, str] | None = None,
        **attrs: Any,
    ) -> None:
        self.weights |= {spec.name: spec for spec in shards.values()}
        self.replaced[node.name] = (
            replace(
                node,
                inputs=node.inputs if inputs is None else inputs,
                weights={**node.weights, **{port: spec.name for port, spec in shards.items()}},
                attrs=MappingProxyType({**node.attrs, **attrs}),
            ),
        )

    def _narrow(self, name: str, heads: int, count: int) -> None:
        """A buffer [T, heads, D] or [T, heads * D] of fewer heads."""
        T, *rest = self._program.buffers[name].shape
        if len(rest) == 1:
            self._shape(name, T, int(rest[0]) // heads * count)
        else:
            self._shape(name, T, count, *rest[1:])

    def _shape(self, name: str, *shape: int | str) -> None:
        self.buffers[name] = replace(self._program.buffers[name], shape=shape)


def all_reduced(node: Node, part: str, out: str, ranks: int) -> Node:
    """The sum of what a node of each rank writes, into the buffer that it had written."""
    return Node(
        "all_reduce",
        {"x": part},
        {"out": out},
        attrs=MappingProxyType({"ranks": tuple(range(ranks))}),
        device=node.device,
        name=f"{node.name}.all_reduce",
        layer=node.layer,
        role=node.role,
        microbatch=node.microbatch,
    )
