"""Whether a program can run: every node against its row of the op table, and reads after writes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from .node import Buffer, Dim, Node
from .op_table.op import DTYPES, REQUIRED, ROLES, Op, Port
from .ops import OPS
from .weight_spec import WeightSpec

_MOST = 1024
"""Signatures of an op that are kept."""
_VALID: dict[str, tuple[Op, set[Hashable]]] = {}


def fault(
    nodes: Iterable[Node],
    buffers: Mapping[str, Buffer],
    sizes: Mapping[str, int],
    weights: Mapping[str, WeightSpec],
    rank: int = 0,
) -> str | None:
    """What keeps these nodes from running on a rank, in words; None if nothing does."""
    for buffer in buffers.values():
        for dim in buffer.shape:
            if isinstance(dim, str) and dim not in sizes:
                return f"{buffer.name} has a dimension {dim!r}, which the bucket does not define"
    written = {b.name for b in buffers.values() if b.kind in ("input", "cache")}
    names: set[str] = set()
    for node in nodes:
        if not node.name:
            return f"a node of {node.op!r} has no name"
        if node.name in names:
            return f"two nodes are called {node.name!r}"
        names.add(node.name)
        wrong = node_fault(node, buffers, weights) or _peers(node, rank) or _order(node, written)
        if wrong:
            return f"{node.name}: {wrong}"
        written.update(node.writes)
    for buffer in buffers.values():
        if buffer.kind == "output" and buffer.name not in written:
            return f"nothing writes the output {buffer.name!r}"
    return None


def node_fault(
    node: Node, buffers: Mapping[str, Buffer], weights: Mapping[str, WeightSpec]
) -> str | None:
    """What of a node is not as its op's row says."""
    op = OPS.get(node.op)
    if op is None:
        return f"there is no op {node.op!r}"
    if node.role not in ROLES:
        return f"there is no role {node.role!r}"
    signature, valid = _signature(node, buffers, weights), _valid_signatures(node.op, op)
    if signature in valid:
        return None
    wrong = _op_fault(node, op, buffers, weights)
    if wrong is None and signature is not None:
        valid.add(signature)
    return wrong


def _op_fault(
    node: Node, op: Op, buffers: Mapping[str, Buffer], weights: Mapping[str, WeightSpec]
) -> str | None:
    wrong = (
        _names("input", node.inputs, op.inputs)
        or _names("output", node.outputs, op.outputs)
        or _names("weight", node.weights, op.weights)
        or _attributes(node, op)
    )
    if wrong:
        return wrong
    for name in (*node.reads, *node.writes):
        if name not in buffers:
            return f"it names {name!r}, which is no buffer"
    for name in node.weights.values():
        if name not in weights:
            return f"it names {name!r}, which is no weight of the program"
    return _dtypes(node, op, buffers) or _dimensions(node, op, buffers, weights)


def _signature(
    node: Node, buffers: Mapping[str, Buffer], weights: Mapping[str, WeightSpec]
) -> Hashable:
    """What decides whether a node is valid, without names, so that layers have the same; None if it
    names what there is not, or has attributes that cannot be compared."""
    try:
        ports = (
            tuple((port, buffers[name].dtype, buffers[name].shape) for port, name in given.items())
            for given in (node.inputs, node.outputs)
        )
        of_weights = tuple((port, weights[name].shape) for port, name in node.weights.items())
        attrs = tuple((name, type(value), value) for name, value in node.attrs.items())
        signature = *ports, of_weights, attrs
        hash(signature)
    except (KeyError, TypeError):
        return None
    return signature


def _valid_signatures(name: str, op: Op) -> set[Hashable]:
    """Signatures of an op's nodes that were checked: each pass has all nodes checked again."""
    if name not in _VALID or _VALID[name][0] is not op or len(_VALID[name][1]) > _MOST:
        _VALID[name] = op, set()
    return _VALID[name][1]


def _peers(node: Node, rank: int) -> str | None:
    if "ranks" in node.attrs and rank not in node.attr("ranks"):
        return f"rank {rank}, which runs it, is not in its group {node.attr('ranks')}"
    if node.attrs.get("peer") == rank:
        return f"its peer is rank {rank} itself"
    return None


def _order(node: Node, written: set[str]) -> str | None:
    for name in node.reads:
        if name not in written:
            return f"it reads {name!r} before it is written"
    for port, name in node.outputs.items():
        if port in node.inputs:
            if node.inputs[port] != name:
                return f"it updates {port!r} in place: {name!r} is not {node.inputs[port]!r}"
        elif name in written:
            return f"it writes {name!r}, which is written already"
    if len(set(node.writes)) < len(node.writes):
        return "it writes one buffer twice"
    return None


def _names(what: str, given: Mapping[str, Any], ports: Mapping[str, Port]) -> str | None:
    for name in given:
        if _port(name, ports) is None:
            return f"it has no {what} {name!r}, but {', '.join(ports) or 'none'}"
    for name, port in ports.items():
        if not port.optional and not port.repeated and name not in given:
            return f"its {what} {name!r} is missing"
        if port.repeated:
            numbers = sorted(int(n[len(name) :]) for n in given if _is_one_of(n, name))
            if numbers != list(range(len(numbers))):
                return f"its {what}s {name!r} are not numbered from 0"
    return None


def _is_one_of(name: str, series: str) -> bool:
    return name.startswith(series) and name[len(series) :].isdecimal()


def _port(name: str, ports: Mapping[str, Port]) -> Port | None:
    port = ports.get(name)
    if port is not None and not port.repeated:
        return port
    return next((p for n, p in ports.items() if p.repeated and _is_one_of(name, n)), None)


def _attributes(node: Node, op: Op) -> str | None:
    for name, value in node.attrs.items():
        if name not in op.attrs:
            return f"it has no attribute {name!r}, but {', '.join(op.attrs) or 'none'}"
        kind = op.attrs[name].kind
        if not isinstance(value, (int, float) if kind is float else kind):
            return f"its attribute {name!r} is {value!r}, which is no {kind.__name__}"
    for name, attr in op.attrs.items():
        if attr.default is REQUIRED and name not in node.attrs:
            return f"its attribute {name!r} is missing"
    return None


def _ports(node: Node, op: Op) -> Iterable[tuple[str, Port, str]]:
    for given, ports in ((node.inputs, op.inputs), (node.outputs, op.outputs)):
        for name, buffer in given.items():
            port = _port(name, ports)
            assert port is not None
            yield name, port, buffer


def _dtypes(node: Node, op: Op, buffers: Mapping[str, Buffer]) -> str | None:
    for name, port, buffer in _ports(node, op):
        allowed, dtype = DTYPES[port.kind], buffers[buffer].dtype
        if allowed is not None and dtype not in allowed:
            return f"{name} is {buffer!r} of {dtype}, which is no {port.kind}"
    return None


def _dimensions(
    node: Node, op: Op, buffers: Mapping[str, Buffer], weights: Mapping[str, WeightSpec]
) -> str | None:
    known: dict[str, Any] = {n: node.attr(n) for n, attr in op.attrs.items() if attr.kind is int}
    rows: list[tuple[str, tuple[str, ...], tuple[Dim, ...]]] = []
    for name, weight in node.weights.items():
        port = _port(name, op.weights)
        assert port is not None
        if (dims := port.dims) is not None:
            rows.append((f"the weight {name}", dims, weights[weight].shape))
    for name, port, buffer in _ports(node, op):
        if port.dims is not None:
            rows.append((f"{name} ({buffer!r})", port.dims, buffers[buffer].shape))
    for _, dims, shape in rows:  # names first: an expression may stand before what it is made of
        if len(dims) <= len(shape):
            for dim, size in zip(dims, _folded(shape, len(dims)), strict=True):
                if dim.isidentifier():
                    known.setdefault(dim, size)
    for what, dims, shape in rows:
        if not _fits(dims, shape, known):
            wanted = ", ".join(_told(dim, known) for dim in dims)
            return f"{what} is {list(shape)}, not [{wanted}]"
    return op.rule({**node.attrs, **known, **node.inputs, **node.outputs})


def _folded(shape: tuple[Dim, ...], count: int) -> tuple[Dim, ...]:
    """The shape in so many dimensions: the last one stands for all that are left."""
    rest = shape[count - 1 :]
    if len(rest) == 1:
        return shape
    return (*shape[: count - 1], math.prod(int(size) for size in rest))


def _fits(dims: tuple[str, ...], shape: tuple[Dim, ...], known: Mapping[str, Dim]) -> bool:
    if len(shape) < len(dims):
        return False
    for dim, size in zip(dims, _folded(shape, len(dims)), strict=True):
        wanted = _value(dim.removeprefix(">"), known)
        if wanted is None:
            continue
        if dim.startswith(">") and isinstance(size, int) and isinstance(wanted, int):
            if size < wanted:
                return False
        elif size != wanted:
            return False
    return True


def _value(dim: str, known: Mapping[str, Dim]) -> Dim | None:
    """The value of a sum of products; None if a name in it has no value here."""
    if dim in known:
        return known[dim]
    total = 0
    for term in dim.split("+"):
        product = 1
        for factor in term.split("*"):
            factor = factor.strip()
            value = int(factor) if factor.isdecimal() else known.get(factor)
            if not isinstance(value, int):
                return None
            product *= value
        total += product
    return total


def _told(dim: str, known: Mapping[str, Dim]) -> str:
    value = _value(dim.removeprefix(">"), known)
    if value is None:
        return dim
    return f"{'at least ' if dim.startswith('>') else ''}{value}"
