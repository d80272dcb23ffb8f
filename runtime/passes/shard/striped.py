"""A program whose tokens are dealt over ranks (zig-zag stripes; OSDI'26 3.2, arXiv 2311.09431).

What reads tokens reads those of the rank's stripe; in front of the last norm all ranks' rows meet.
How a rank attends to what others have is one of two forms: ``ring`` and ``gathered``. In both every
rank ends with the keys and values of all tokens in its cache, as decode steps read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from pykernels.errors import PykernelsError

from ...kv_cache.layout import cache_inputs
from ...program import Buffer, Node, Program, repeated
from ...program.node import Dim
from ...program.op_table.collectives import ALL_TOKENS
from ..layers import rebuilt
from .stripes import BLOCK_SLOTS, of_all, of_rank, stripe_tokens


def striped(
    program: Program, rank: int, ranks: int, form: Callable[[Program, int, int], Stripe]
) -> Program:
    """The program of a rank's stripe, up to the last norm, in front of which all ranks' rows meet.

    Args:
        form: ``ring.Ring`` or ``gathered.Gathered``.

    Raises:
        PykernelsError: two microbatches.
    """
    if any(node.microbatch for node in program.nodes):
        raise PykernelsError(f"{program.name!r} has two microbatches", "Stripe prompts alone")
    stripe = form(program, rank, ranks)
    nodes = [new for node in program.nodes for new in stripe.nodes(node)]
    rows = stripe_tokens(program.sizes["T"], ranks)
    sizes = {**program.sizes, **stripe.sizes, "T": rows, ALL_TOKENS: ranks * rows}
    named = {name for node in nodes for name in (*node.reads, *node.writes)}
    kept = {
        name: buffer
        for name, buffer in program.buffers.items()
        if buffer.kind != "input" or name in named
    }
    program = replace(program, sizes=sizes, buffers=kept, rank=rank)
    new = {name: buffer for name, buffer in stripe.buffers.items() if name in named}
    return rebuilt(program, nodes, new)


class Stripe:
    """What becomes of a program's nodes on a rank.

    Attributes:
        buffers: new buffers; ``sizes``: of the program that are others.
    """

    sizes: Mapping[str, int] = MappingProxyType({})

    def __init__(self, program: Program, rank: int, ranks: int) -> None:
        self._program, self._rank, self._ranks = program, rank, ranks
        self.buffers: dict[str, Buffer] = {}

    def nodes(self, node: Node) -> list[Node]:
        """What takes the place of a node."""
        if node.op in ("gqa_rope_cache_write", "mla_rope_cache_write"):
            return self._write(node)
        if node.op in ("attention", "attention_expanded", "per_head_linear"):
            return self._attend(node)
        if node.op == "rms_norm" and "rows" in node.inputs:
            return self._meet(node)
        node = replace(node, inputs=self._inputs(node.inputs))
        if node.op == "router":  # padding takes no experts
            inputs = {**node.inputs, "slot_mapping": self._own("slot_mapping")}
            return [replace(node, inputs=inputs)]
        return [node]

    def _write(self, node: Node) -> list[Node]:
        """What takes the place of a write to the cache."""
        raise NotImplementedError

    def _attend(self, node: Node) -> list[Node]:
        """What takes the place of attention, and of products that some of its tokens leave out."""
        raise NotImplementedError

    def _inputs(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """The inputs with those by token, or by sequence, replaced by the rank's own."""
        return {port: self._own(name) or name for port, name in inputs.items()}

    def _own(self, name: str, rank: int | None = None) -> str:
        """The rank's own of an input by token or by sequence; "" of any other buffer."""
        buffer = self._program.buffers[name]
        if buffer.kind != "input" or buffer.shape not in (("T",), ("S",)):
            return ""
        return self._input(of_rank(self._rank if rank is None else rank, name), *buffer.shape)

    def _input(self, name: str, dim: Dim) -> str:
        self.buffers[name] = Buffer(name, (dim,), torch.int64, "input")
        return name

    def _written_to(self, node: Node, blocks: Mapping[str, str]) -> Node:
        """The write with rows of the rank's own, by the parts of its cache, instead of slots."""
        inputs = {port: name for port, name in node.inputs.items() if port not in blocks}
        inputs["slot_mapping"] = self._input(BLOCK_SLOTS, "T")
        return replace(node, inputs=inputs, outputs={**node.outputs, **blocks})

    def _to_cache(
        self, node: Node, blocks: Mapping[str, str], slot_mapping: str, name: str
    ) -> Node:
        """The rows of these blocks to their slots of a node's cache."""
        caches = cache_inputs(node)
        rows = {**repeated("rows", blocks.values()), **repeated("cache", caches.values())}
        return replace(
            node,
            op="cache_write",
            inputs={**rows, "slot_mapping": slot_mapping},
            outputs=repeated("cache", caches.values()),
            weights={},
            attrs=MappingProxyType({}),
            name=name,
        )

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


def gathered(node: Node, local_name: str, every: str, ranks: int, name: str = "") -> Node:
    """The rows of all ranks, in front of a node that reads them."""
    return Node(
        "all_gather",
        {"x": local_name},
        {"out": every},
        attrs=MappingProxyType({"ranks": tuple(range(ranks))}),
        device=node.device,
        name=name or f"{node.name}.all_gather",
        layer=node.layer,
        role=node.role,
    )
