"""What a row of the op table is made of: ports, attributes, and the rules between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_INDEX = frozenset({torch.int32, torch.int64})
DTYPES: Mapping[str, frozenset[torch.dtype] | None] = {
    "activation": frozenset({torch.float32, torch.bfloat16, torch.float16}),
    "float32": frozenset({torch.float32}),
    "index": _INDEX,
    "int32": frozenset({torch.int32}),
    "bytes": frozenset({torch.uint8}),
    "kv": frozenset({torch.float32, torch.bfloat16, torch.float8_e4m3fn}),
    "any": None,
}
"""Classes of dtype. "activation": a device chooses its precision; "float32": kept in float32 on
every device (the residual stream, logits, routing, scales); "index": token ids, positions, slots;
"int32": tables of token ids, counts or bits; "bytes": weights in a layout of the device's; "kv": as
``kv_cache.layout`` says."""

ROLES = ("", "attention", "router", "routed", "cached", "deferred", "shared", "dense", "load")
"""What a node does in its layer: "router" from the gate to the choice of experts, "routed" the
experts that are chosen, "cached" those of them that another device has in slots, "deferred" those
whose sum joins a layer later, "shared" the experts that every token passes, "dense" the MLP of a
layer without experts, "load" what brings experts to the device."""


@dataclass(frozen=True)
class Port:
    """An input, an output or a weight.

    Attributes:
        kind: of dtype, a key of ``DTYPES``; "" of weights, whose formats the devices know.
        dims: None: any.
        repeated: any number of them, called ``name0``, ``name1`` and so on.
        paged: a part of a layer's cache, in pages.
    """

    kind: str
    dims: tuple[str, ...] | None
    optional: bool = False
    repeated: bool = False
    paged: bool = False


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class Attr:
    """A constant of a node. An int's name is a dimension, too."""

    kind: type
    default: Any = REQUIRED


Rule = Callable[[Mapping[str, Any]], str | None]
"""(attributes, dimensions, inputs and outputs of a node, by name) -> what is wrong with it."""


@dataclass(frozen=True)
class Op:
    """A row of the table.

    Attributes:
        rule: what dimensions do not say.
        asynchronous: another device may still read its inputs after the node has finished.
        stream: runs its nodes that name none. Nodes of one stream run in order; across streams only
            nodes that share a buffer do.
    """

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    weights: Mapping[str, Port] = field(default_factory=dict)
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    rule: Rule = lambda node: None
    asynchronous: bool = False
    stream: str = ""
