"""Zig-zag striped attention (OSDI'26 3.2; arXiv 2311.09431): each rank has a stripe of the tokens.

A rank's keys and values, as its cache holds them, go round a ring; with each block that passes it
attends to those of its own tokens' sequences (Pass-KV), and writes them to its cache: in the end
every rank has the keys and values of all tokens, as decode steps read them. What a sequence has had
before the step is in each rank's cache already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ...kv_cache.layout import PAGE, cache_inputs
from ...program import Buffer, Node, Program, repeated
from ...program.op_table.collectives import ALL_TOKENS
from ..layers import rebuilt
from .stripes import BLOCK_SLOTS, PREFIX_LENGTHS, of_all, of_rank, stripe_tokens

SEND, RECEIVE = "send", "receive"
"""Streams of nodes that only move bytes to the next rank, and from the one before."""
_BY_TOKEN = ("tokens", "positions", "sequences", "slot_mapping")


def striped(program: Program, rank: int, ranks: int) -> Program:
    """The program of a rank's stripe, up to the last norm, in front of which all ranks' rows meet.

    Raises:
        PykernelsError: two microbatches; no attention that it knows.
    """
    if any(node.microbatch for node in program.nodes):
        raise PykernelsError(f"{program.name!r} has two microbatches", "Stripe prompts alone")
    stripe = _Stripe(program, rank, ranks)
    nodes = [new for node in program.nodes for new in stripe.nodes(node)]
    rows = stripe_tokens(program.sizes["T"], ranks)
    sizes = {**program.sizes, "T": rows, ALL_TOKENS: ranks * rows}
    named = {name for node in nodes for name in (*node.reads, *node.writes)}
    kept = {
        name: buffer
        for name, buffer in program.buffers.items()
        if buffer.kind != "input" or name in named
    }
    program = replace(program, sizes=sizes, buffers=kept, rank=rank)
    return rebuilt(program, nodes, stripe.buffers)


class _Stripe:
    """What becomes of a program's nodes on a rank.

    Attributes:
        buffers: new buffers.
    """

    def __init__(self, program: Program, rank: int, ranks: int) -> None:
        self._program, self._rank, self._ranks = program, rank, ranks
        self._pages = -(-stripe_tokens(program.sizes["T"], ranks) // PAGE)
        self.buffers: dict[str, Buffer] = {}

    def nodes(self, node: Node) -> list[Node]:
        """What takes the place of a node."""
        if node.op in ("gqa_rope_cache_write", "mla_rope_cache_write"):
            return [self._write(node)]
        if node.op == "attention":
            return self._ring(node)
        if node.op == "attention_expanded":  # the ring attends to all keys
            return []
        if node.op == "per_head_linear":
            attrs = {key: value for key, value in node.attrs.items() if key != "expand_from"}
            inputs = {port: name for port, name in node.inputs.items() if port != "sequences"}
            return [replace(node, inputs=inputs, attrs=MappingProxyType(attrs))]
        if node.op == "rms_norm" and "rows" in node.inputs:
            return self._meet(node)
        return [replace(node, inputs=self._inputs(node.inputs))]

    def _inputs(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """The inputs with those by token replaced by the rank's own."""
        return {
            port: self._own(name) if self._by_token(name) else name for port, name in inputs.items()
        }

    def _by_token(self, name: str) -> bool:
        buffer = self._program.buffers[name]
        return buffer.kind == "input" and buffer.shape == ("T",)

    def _own(self, name: str, rank: int | None = None) -> str:
        return self._input(of_rank(self._rank if rank is None else rank, name), "T")

    def _input(self, name: str, dim: str) -> str:
        self.buffers[name] = Buffer(name, (dim,), torch.int64, "input")
        return name

    def _block(self, cache: str, number: int) -> str:
        """The rows of one rank's tokens in a part of the cache."""
        name, part = f"{cache}.block{number}", self._program.buffers[cache]
        shape = self._pages, PAGE, *part.shape[2:]
        self.buffers[name] = replace(part, name=name, shape=shape, kind="scratch")
        return name

    def _write(self, node: Node) -> Node:
        """Keys and values in rows of their own instead of cache slots."""
        parts = {part: self._block(name, 0) for part, name in cache_inputs(node).items()}
        inputs = {port: name for port, name in node.inputs.items() if port not in parts}
        inputs["slot_mapping"] = self._input(BLOCK_SLOTS, "T")
        return replace(node, inputs=inputs, outputs={**node.outputs, **parts})

    def _ring(self, node: Node) -> list[Node]:
        """Attention to what was there before, then to each rank's block as it comes round."""
        caches, nodes = cache_inputs(node), list[Node]()
        out, lse = node.outputs["out"], f"{node.name}.lse"
        self.buffers[lse] = Buffer(lse, ("T", node.attr("heads")))
        queries = {
            "q": node.inputs["q"],
            "positions": self._own("positions"),
            "sequences": self._own("sequences"),
        }
        attrs = {key: value for key, value in node.attrs.items() if key != "expand_from"}
        partial = replace(
            node, weights={}, outputs={"out": out, "lse": lse}, attrs=MappingProxyType(attrs)
        )
        prefix = {
            "prefix_lengths": self._own(PREFIX_LENGTHS),
            "page_table": node.inputs["page_table"],
        }
        before = replace(
            partial,
            op="attention_prefix",
            inputs={**queries, **prefix, **caches},
            weights=node.weights,
            name=f"{node.name}.prefix",
        )
        for i in range(self._ranks):
            blocks = {part: self._block(name, i) for part, name in caches.items()}
            source = (self._rank - i) % self._ranks
            if i + 1 < self._ranks:
                coming = [self._block(name, i + 1) for name in caches.values()]
                nodes += self._pass_on(node, i, list(blocks.values()), coming)
            if i == 0:
                nodes.append(before)
            keys = {f"key_{name}": self._own(name, source) for name in ("positions", "sequences")}
            nodes.append(
                replace(
                    partial,
                    op="attention_block",
                    inputs={**queries, **keys, **blocks, "out": out, "lse": lse},
                    name=f"{node.name}.block{i}",
                )
            )
            rows = {**repeated("rows", blocks.values()), **repeated("cache", caches.values())}
            nodes.append(
                replace(
                    node,
                    op="cache_write",
                    inputs={**rows, "slot_mapping": self._own("slot_mapping", source)},
                    outputs=repeated("cache", caches.values()),
                    weights={},
                    attrs=MappingProxyType({}),
                    name=f"{node.name}.write{i}",
                )
            )
        return nodes

    def _pass_on(self, node: Node, i: int, blocks: list[str], coming: list[str]) -> list[Node]:
        """A block to the next rank, and the one that comes from the rank before."""
        ends: list[Node] = []
        for op, step, stream in (("send", 1, SEND), ("recv", -1, RECEIVE)):
            values = repeated("value", blocks if op == "send" else coming)
            attrs: dict[str, Any] = {"peer": (self._rank + step) % self._ranks}
            ends.append(
                replace(
                    node,
                    op=op,
                    inputs=values if op == "send" else {},
                    outputs=values if op == "recv" else {},
                    weights={},
                    attrs=MappingProxyType(attrs),
                    name=f"{node.name}.{op}{i}",
                    on_stream=stream,
                )
            )
        return ends

    def _meet(self, node: Node) -> list[Node]:
        """The last norm, of rows of all ranks' tokens."""
        x = self._program.buffers[node.inputs["x"]]
        local_name, every = f"{node.name}.own", f"{node.name}.all"
        self.buffers[local_name] = replace(x, name=local_name, kind="scratch")
        self.buffers[every] = replace(x, name=every, shape=(ALL_TOKENS, *x.shape[1:]))
        read = repeated("x", [node.inputs["x"], *node.series("add")])
        add = replace(node, op="add", inputs=read, outputs={"out": local_name}, weights={})
        add = replace(add, attrs=MappingProxyType({}), name=f"{node.name}.sum")
        rows = self._input(of_all("logits_indices"), "R")
        norm = replace(node, inputs={"x": every, "rows": rows})
        return [add, gathered(node, local_name, every, self._ranks), norm]


def gathered(node: Node, local_name: str, every: str, ranks: int) -> Node:
    """The rows of all ranks, in front of a node that reads them."""
    return Node(
        "all_gather",
        {"x": local_name},
        {"out": every},
        attrs=MappingProxyType({"ranks": tuple(range(ranks))}),
        device=node.device,
        name=f"{node.name}.all_gather",
        layer=node.layer,
        role=node.role,
    )
