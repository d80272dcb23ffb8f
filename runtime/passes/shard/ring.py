"""Ring attention (Pass-KV): a rank's keys and values, as its cache holds them, go round a ring.

With each block that passes, a rank attends to those of its own tokens' sequences, and writes them
to its cache. What a sequence has had before the step is in each rank's cache already.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...kv_cache.layout import PAGE, cache_inputs
from ...program import Buffer, Node, repeated
from .striped import Stripe
from .stripes import PREFIX_LENGTHS, of_rank, stripe_tokens

SEND, RECEIVE = "send", "receive"
"""Streams of nodes that only move bytes to the next rank, and from the one before."""


class Ring(Stripe):
    """A rank of a ring."""

    def _block(self, cache: str, number: int) -> str:
        """The rows of one rank's tokens in a part of the cache."""
        name, part = f"{cache}.block{number}", self._program.buffers[cache]
        pages = -(-stripe_tokens(self._program.sizes["T"], self._ranks) // PAGE)
        shape = pages, PAGE, *part.shape[2:]
        self.buffers[name] = replace(part, name=name, shape=shape, kind="scratch")
        return name

    def _write(self, node: Node) -> list[Node]:
        blocks = {part: self._block(name, 0) for part, name in cache_inputs(node).items()}
        return [self._written_to(node, blocks)]

    def _attend(self, node: Node) -> list[Node]:
        if node.op == "attention":
            return self._ring(node)
        if node.op == "attention_expanded":  # the ring attends to all keys
            return []
        attrs = {key: value for key, value in node.attrs.items() if key != "expand_from"}
        inputs = {port: name for port, name in node.inputs.items() if port != "sequences"}
        return [replace(node, inputs=inputs, attrs=MappingProxyType(attrs))]

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
            "prefix_lengths": self._input(of_rank(self._rank, PREFIX_LENGTHS), "T"),
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
            slots = self._own("slot_mapping", source)
            nodes.append(self._to_cache(node, blocks, slots, f"{node.name}.write{i}"))
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
