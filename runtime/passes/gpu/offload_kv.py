"""Keys and values that do not fit into a GPU's memory cross to it in every step (OSDI'26 3.1, of
the cache instead of weights).

A layer's cache lies in pinned main memory. The pages that the step's sequences read come to a
staging buffer, which is as large as the layer's cache, so that a page has the same number there and
nothing else of the step changes: its tokens' rows are written to the staging, attention reads it,
and the rows go back to the cache. Layers take a few staging buffers in turns:

    list pages, load 0, load 1, (layer 0: write, store 0, attend), load 2, (layer 1: ..

A load waits until the layer that had its staging before has attended, and for nothing else: it runs
in a stream of its own (``Node.stream``) beside the layers in front. What crosses is what sequences
have written, once a step: short contexts cost little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from pykernels.errors import PykernelsError

from ...kv_cache.layout import cache_inputs
from ...program import Buffer, Node, Program
from ...program.node import repeated
from ..layers import rebuilt
from ..order import ordered
from ..stream_dense import STAGING_BUFFERS

_CPU = "cpu"
_DECODES = frozenset({"table", "decode_lengths"})
"""What attention reads of the sequences of decode steps."""


@dataclass
class _Layer:
    """A layer whose cache is in main memory, or a microbatch of it.

    Attributes:
        first, last: numbers of the nodes that use the cache. parts: its buffers, by port.
        window: of its attention; 0: none.
    """

    node: Node
    first: int
    last: int
    parts: dict[str, str] = field(default_factory=dict)
    window: int = 0


@ordered
def offload_kv(program: Program, layers: Collection[int]) -> Program:
    """The program with the caches of these layers in main memory, pages loaded in each step.

    Args:
        layers: numbers of layers with keys and values; others are left as they are, and those that
            attend on the CPU.

    Raises:
        PykernelsError: attention of such a layer does not read metadata of a GPU
            (``gpu_metadata``), or layers are not one behind the other.
    """
    found = _layers(program, layers)
    if not found:
        return program
    buffers: dict[str, Buffer] = {}
    metadata: dict[tuple[str, str], Node] = {}
    for node in program.nodes:
        if node.op == "attention_metadata":
            metadata[node.device, node.microbatch] = _with_lengths(program, node, buffers)
    lists: dict[tuple[str, str, int], Node] = {}
    for layer in found:
        key = layer.node.device, layer.node.microbatch
        if key not in metadata:
            raise PykernelsError(
                f"layer {layer.node.layer} of {program.name!r} attends on {layer.node.device}",
                "Keep keys and values in main memory beside a GPU, behind gpu_metadata",
            )
        if "key_lengths" in metadata[key].outputs:
            layer.window = 0  # a chunk of a prompt has queries far behind its last key
        if (*key, layer.window) not in lists:
            lists[*key, layer.window] = _list(program, metadata[key], layer, buffers)
    before: dict[int, list[Node]] = {0: [*metadata.values(), *lists.values()]}
    staging: dict[tuple[str, int | None, str], Mapping[str, str]] = {}
    slots: dict[tuple[object, ...], list[_Layer]] = {}
    for layer in found:
        shapes = {port: program.buffers[name] for port, name in layer.parts.items()}
        kind = layer.node.device, *((p, b.shape, b.dtype) for p, b in shapes.items())
        number = [*slots].index(kind) if kind in slots else len(slots)
        users = slots.setdefault(kind, [])
        label = f"kv.{number}.slot{len(users) % STAGING_BUFFERS}"
        names = {port: f"{label}.{port}" for port in layer.parts}
        buffers |= {
            names[port]: Buffer(names[port], buffer.shape, buffer.dtype)
            for port, buffer in shapes.items()
        }
        at, used = 0, len(users) >= STAGING_BUFFERS
        if used:
            at = users[-STAGING_BUFFERS].last + 1
        if at > layer.first:
            raise PykernelsError(
                f"layers of {program.name!r} are not one behind the other", "Give more buffers"
            )
        users.append(layer)
        staging[_key(layer.node)] = names
        pages = lists[layer.node.device, layer.node.microbatch, layer.window].outputs["pages"]
        before.setdefault(at, []).append(_load(layer, pages, names, used))
    nodes = list[Node]()
    for i, node in enumerate(program.nodes):
        nodes += before.get(i, [])
        if node.op == "attention_metadata":  # it is in front of all
            continue
        parts = cache_inputs(node)
        there = staging.get(_key(node), {}) if parts else {}
        nodes.append(_on_staging(node, there))
        if there and set(parts.values()) & set(node.writes):
            nodes.append(_store(node, parts, there))
    return rebuilt(program, nodes, buffers)


def host_caches(program: Program) -> frozenset[str]:
    """The cache buffers of a program that are in main memory beside its GPUs."""
    return frozenset(
        name for node in program.nodes if node.op == "load_pages" for name in node.series("cache")
    )


def _key(node: Node) -> tuple[str, int | None, str]:
    return node.device, node.layer, node.microbatch


def _layers(program: Program, layers: Collection[int]) -> list[_Layer]:
    found: dict[tuple[str, int | None, str], _Layer] = {}
    for i, node in enumerate(program.nodes):
        if node.layer not in layers or node.device == _CPU or not (parts := cache_inputs(node)):
            continue
        layer = found.setdefault(_key(node), _Layer(node, i, i))
        layer.last = i
        layer.parts |= parts
        if node.op == "attention":
            layer.window = node.attr("window")
    return list(found.values())


def _with_lengths(program: Program, metadata: Node, buffers: dict[str, Buffer]) -> Node:
    """Metadata with the keys of all sequences, those of chunks too. Adds what it writes."""
    if metadata.outputs.keys() <= _DECODES:
        return metadata
    name = f"{_prefix(metadata)}.key_lengths"
    rows = program.buffers[metadata.outputs["table"]].shape[:1]
    buffers[name] = Buffer(name, rows, torch.int32)
    return replace(metadata, outputs={**metadata.outputs, "key_lengths": name})


def _list(program: Program, metadata: Node, layer: _Layer, buffers: dict[str, Buffer]) -> Node:
    """The node that lists the pages of a step's sequences. Adds what it writes."""
    name = f"{_prefix(metadata)}.pages{layer.window or ''}"
    cache = next(iter(layer.parts.values()))
    buffers[name] = Buffer(name, (1 + program.shape(cache)[0],), torch.int32)
    written = metadata.outputs
    lengths = written["key_lengths" if "key_lengths" in written else "decode_lengths"]
    return Node(
        "list_pages",
        {"table": written["table"], "lengths": lengths},
        {"pages": name},
        attrs={"window": layer.window},
        device=metadata.device,
        name=name,
        microbatch=metadata.microbatch,
    )


def _prefix(metadata: Node) -> str:
    return metadata.name.removesuffix(".metadata")


def _load(layer: _Layer, pages: str, names: Mapping[str, str], used: bool) -> Node:
    staging = repeated("staging", names.values())
    return Node(
        "load_pages",
        {"pages": pages, **repeated("cache", layer.parts.values()), **(staging if used else {})},
        staging,
        device=layer.node.device,
        name=f"{layer.node.name}.load_pages",
        layer=layer.node.layer,
        role="load",
        microbatch=layer.node.microbatch,
    )


def _on_staging(node: Node, names: Mapping[str, str]) -> Node:
    """The node, with the staging instead of the layer's cache."""
    if not names:
        return node
    inputs = {port: names.get(port, name) for port, name in node.inputs.items()}
    outputs = {port: names.get(port, name) for port, name in node.outputs.items()}
    return replace(node, inputs=inputs, outputs=outputs)


def _store(node: Node, parts: Mapping[str, str], names: Mapping[str, str]) -> Node:
    cache = repeated("cache", parts.values())
    staging = repeated("staging", (names[port] for port in parts))
    return replace(
        node,
        op="store_rows",
        inputs={**staging, **cache, "slot_mapping": node.inputs["slot_mapping"]},
        outputs=cache,
        weights={},
        attrs={},
        name=f"{node.name}.store_rows",
        role="load",
    )
