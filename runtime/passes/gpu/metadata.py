"""All that launches of a GPU read, as buffers: the last pass of a program on its way there.

Kernels of attention do not read positions and page tables as the engine has them, but who attends
by which kernel (``attention_metadata``, which the host writes in front of a step). Experts on a GPU
read their tokens in order (``sort_routing``), once for all nodes that take the same choice. Latents
in bfloat16 lie apart from their rotated parts. In decode steps gated delta nets take two launches,
and the factors of shared experts one. Programs of other devices stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ...program import Buffer, Node, Program
from ...program.node import Dim
from ...program.ops import OPS
from ...program.sizes import microbatch_name
from ...program.step_inputs import WINDOW_TABLE
from ..layers import rebuilt
from ..on_ref import REF
from ..order import ordered
from .delta_nets import with_delta_steps
from .shared_factors import with_shared_factors

MAX_CHUNK = 128
"""Tokens of a chunk: a block of the prefill kernels, so that a launch which has room for any mix of
sequences has few blocks too many."""
_BY_SEQUENCE = ("query_starts", "query_lengths", "lengths", "page_rows")
_SEQUENCES = ("positions", "sequences", "page_table", *_BY_SEQUENCE)
_CHUNKS = ("chunk_starts", "chunk_lengths", "chunk_keys", "chunk_table")
_TOKENS = ("token_table", "token_lengths", "expansion")
_READ = {
    "attention": ("table", "decode_lengths", *_CHUNKS),
    "attention_expanded": (*_CHUNKS, "chunk_rows", "expansion"),
    "per_head_linear": ("expansion",),
}
"""Metadata that each op reads; ``_TOKENS`` where tokens attend to latents one by one."""
_OF_WINDOWS = {"table": "window_table", "chunk_table": "window_chunk_table"}
"""What layers with a window read instead, where they have pages of their own."""
_DTYPES = {"expansion": torch.int64}  # on the host
_CPU = "cpu"
ORDER = ("pairs", "starts", "positions")
"""Ports of sorted choices."""


@ordered
def gpu_metadata(program: Program, decode: bool = False, max_chunk: int = MAX_CHUNK) -> Program:
    """The program with what launches on GPUs read beside activations and weights.

    Args:
        decode: every sequence of its steps has one token.
        max_chunk: longer chunks are cut, where keys and values are read from the cache as they are.
    """
    whole = _with_orders(_with_sequences(with_latents_apart(program), decode, max_chunk))
    return with_shared_factors(with_delta_steps(_of_one_token(whole))) if decode else whole


def most_chunks(T: int, S: int, chunk: int) -> int:
    """The most chunks of S sequences of T tokens together."""
    return min(T, S + (T // chunk if chunk < T else 0))


def with_latents_apart(program: Program) -> Program:
    """The program with bfloat16 latents and their rotated parts in caches of their own."""
    new_buffers: dict[str, Buffer] = {}
    for node in program.nodes:
        name = node.outputs.get("latent", "")
        on_gpu = node.device not in (_CPU, REF)
        if node.op == "mla_rope_cache_write" and on_gpu and "rope" not in node.outputs:
            buffer, L = program.buffers[name], program.weight(node, "kv_norm").shape[0]
            *pages, width = buffer.shape
            new_buffers[name] = replace(buffer, shape=(*pages, L))
            rope = f"{name}.rope"
            new_buffers[rope] = replace(buffer, name=rope, shape=(*pages, int(width) - L))
    if not new_buffers:
        return program
    nodes = list[Node]()
    for node in program.nodes:
        if (name := node.inputs.get("latent", "")) in new_buffers:
            port = {"rope": f"{name}.rope"}
            outputs = {**node.outputs, **port} if "latent" in node.outputs else node.outputs
            node = replace(node, inputs={**node.inputs, **port}, outputs=outputs)
        nodes.append(node)
    return rebuilt(program, nodes, new_buffers)


@dataclass(frozen=True)
class _Metadata:
    """Metadata of the attention of one GPU, or of a microbatch there.

    Attributes:
        nodes: nodes that write it; ``buffers``: theirs; ``names``: of the buffers, by port.
        chunk: tokens of a chunk; 0: it has none.
        expand_from: 0: nothing is expanded.
    """

    nodes: tuple[Node, ...]
    buffers: Mapping[str, Buffer]
    names: Mapping[str, str]
    chunk: int
    expand_from: int

    def read_by(self, node: Node) -> Node | None:
        """The node, which reads it; None: it has nothing to do."""
        inputs = {port: name for port, name in node.inputs.items() if port not in _SEQUENCES}
        attrs = {name: value for name, value in node.attrs.items() if name != "expand_from"}
        if self.expand_from:
            attrs["expand_from"] = self.expand_from
        elif node.op == "attention_expanded":
            return None
        if node.op == "attention" and "token_table" not in self.names:
            attrs["chunk"] = self.chunk
        one_by_one = "token_table" in self.names and node.op == "attention"
        instead = _OF_WINDOWS if _has_own_pages(node) else {}
        ports = {
            port: self.names[instead.get(port, port)]
            for port in (_TOKENS if one_by_one else _READ[node.op])
            if port in self.names
        }
        return replace(node, inputs={**inputs, **ports}, attrs=attrs)


def _with_sequences(program: Program, decode: bool, max_chunk: int) -> Program:
    """The program whose nodes of attention read metadata."""
    gpus = {node.device for node in program.nodes} - {_CPU}
    made: dict[tuple[str, str], _Metadata] = {}
    for node in program.nodes:
        key = node.device, node.microbatch
        if node.op == "attention" and _reads(node) and key not in made:
            prefix = "attention" if len(gpus) == 1 else f"{node.device}.attention"
            made[key] = _metadata(
                program, node, decode, max_chunk, microbatch_name(node.microbatch, prefix)
            )
    nodes, begun = list[Node](), set[tuple[str, str]]()
    for node in program.nodes:
        key = node.device, node.microbatch
        if key not in made or node.op not in _READ or not _reads(node):
            nodes.append(node)
            continue
        if key not in begun:
            begun.add(key)
            nodes += made[key].nodes
        if (reading := made[key].read_by(node)) is not None:
            nodes.append(reading)
    if not made:
        return program
    return rebuilt(program, nodes, {n: b for one in made.values() for n, b in one.buffers.items()})


def _has_own_pages(node: Node) -> bool:
    """Whether it is of a layer with a window that has pages of its own."""
    return node.inputs.get("page_table") == WINDOW_TABLE


def _reads(node: Node) -> bool:
    return node.device != _CPU and "sequences" in node.inputs


def _metadata(program: Program, node: Node, decode: bool, max_chunk: int, prefix: str) -> _Metadata:
    """What such a node of attention reads."""
    latents = "latent" in node.inputs
    expand_from = 0 if decode else node.attr("expand_from")
    tokens: Dim = program.buffers[node.inputs["positions"]].shape[0]
    T, pages = (
        program.shape(node.inputs["positions"])[0],
        program.shape(node.inputs["page_table"])[1],
    )
    S = T if node.microbatch else min(T, program.sizes["S"])
    # E4M3 becomes rows of bfloat16 before a prefill: once a sequence, not once a piece.
    coded = any(program.buffers[name].dtype == torch.float8_e4m3fn for name in node.reads)
    chunk = 0
    shapes: dict[str, tuple[Dim, ...]] = {"table": (S, pages)}
    if latents and not decode:
        shapes |= dict.fromkeys(("token_rows", "token_lengths"), (tokens,))
    else:
        shapes["decode_lengths"] = (S,)
    if expand_from or not (latents or decode):
        chunk = T if latents or coded else min(T, max_chunk)
        C = most_chunks(T, S, chunk)
        by_chunk = ("chunk_starts", "chunk_lengths", "chunk_keys")
        shapes |= {**dict.fromkeys(by_chunk, (C,)), "chunk_table": (C, pages)}
        if expand_from:
            shapes |= {"chunk_rows": (C,), "expansion": (3,)}
    inputs = {port: name for port, name in node.inputs.items() if port in _SEQUENCES}
    if any(map(_has_own_pages, program.nodes)):
        inputs |= {"page_table": "page_table", "window_page_table": WINDOW_TABLE}
        shapes |= {own: shapes[port] for port, own in _OF_WINDOWS.items() if port in shapes}
    names = {port: f"{prefix}.{port}" for port in shapes}
    writes = Node(
        "attention_metadata",
        inputs,
        dict(names),
        attrs={"expand_from": expand_from, "chunk": chunk},
        device=node.device,
        name=f"{prefix}.metadata",
        microbatch=node.microbatch,
    )
    nodes = [writes]
    if "token_rows" in names:
        read = {"table": names["table"], "rows": names["token_rows"]}
        names["token_table"], shapes["token_table"] = f"{prefix}.token_table", (tokens, pages)
        out, name = {"out": names["token_table"]}, f"{prefix}.tables"
        nodes.append(
            Node(
                "select_rows", read, out, device=node.device, name=name, microbatch=node.microbatch
            )
        )
    buffers = {
        names[port]: Buffer(names[port], shape, _DTYPES.get(port, torch.int32))
        for port, shape in shapes.items()
    }
    return _Metadata(tuple(nodes), buffers, names, chunk, expand_from)


def _of_one_token(program: Program) -> Program:
    """The program whose recurrent nodes on GPUs have room for one token of each sequence."""
    nodes = [
        replace(node, attrs={**node.attrs, "longest": 1})
        if node.device != _CPU and "longest" in OPS[node.op].attrs
        else node
        for node in program.nodes
    ]
    return replace(program, nodes=tuple(nodes))


def _with_orders(program: Program) -> Program:
    """The program whose experts on GPUs read tokens in order, and whose routers there know padding.

    Of one token a router makes the choice and its order in one launch.
    """
    buffers: dict[str, Buffer] = {}
    orders: dict[tuple[str, str, int], dict[str, str]] = {}  # by device, ids and experts
    for node in program.nodes:
        if node.op == "moe_ffn" and node.device != _CPU and "ids" in node.inputs:
            ids, E = node.inputs["ids"], program.weight(node, "experts").shape[0]
            orders[node.device, ids, E] = {port: f"{ids}.{port}{E}" for port in ORDER}
            (T, topk), shape = program.shape(ids), program.buffers[ids].shape
            sizes: tuple[tuple[Dim, ...], ...] = ((T * topk,), (E + 1,), shape)
            for port, size in zip(ORDER, sizes, strict=True):
                name = f"{ids}.{port}{E}"
                buffers[name] = Buffer(name, size, torch.int32)
    nodes, sorted_here = list[Node](), set[tuple[str, str, int]]()
    for node in program.nodes:
        if node.op == "router" and node.device != _CPU:
            key = node.device, node.outputs["ids"], node.attr("experts")
            slots = microbatch_name(node.microbatch, "slot_mapping")
            if program.shape(key[1])[0] == 1:
                node = replace(node, outputs={**node.outputs, **orders.get(key, {})})
                sorted_here.add(key)
            elif slots in program.buffers and "slot_mapping" not in node.inputs:
                node = replace(node, inputs={**node.inputs, "slot_mapping": slots})
        elif node.op == "moe_ffn" and node.device != _CPU and "ids" in node.inputs:
            key = node.device, node.inputs["ids"], program.weight(node, "experts").shape[0]
            if key not in sorted_here:
                sorted_here.add(key)
                nodes.append(_sorting(node, key[2], orders[key]))
            node = replace(node, inputs={**node.inputs, **orders[key]})
        nodes.append(node)
    return rebuilt(program, nodes, buffers)


def _sorting(experts: Node, E: int, order: Mapping[str, str]) -> Node:
    return replace(
        experts,
        op="sort_routing",
        inputs={"ids": experts.inputs["ids"]},
        outputs=dict(order),
        weights={},
        attrs={"experts": E},
        name=f"{experts.name}.order",
        role="",
    )
