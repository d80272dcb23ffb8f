"""Which node a kernel of the GPU belongs to.

A trace has kernels' names only. The module that defines a kernel says which ops launch it, and a
stream runs a program's nodes in their order, so each kernel belongs to the node before it if that
one's op may launch it, else to the next node whose op may. Between neighbours that launch the same
kernels the next one begins where the kernel comes again that the one before began with.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..program.node import Node
from .gpu import idle
from .timeline import COPY, STREAM, Span, op_of

OPS_OF = {
    "attention": ("attention", "attention_expanded"),
    "delta_net": ("gated_delta_rule",),
    "delta_net.causal_conv1d": ("causal_conv1d",),
    "delta_net.copy_states": (),  # between steps
    "delta_net.decode._delta_step": ("delta_step",),
    "delta_net.decode._norm_and_shift": ("delta_norm",),
    "delta_net.gate": ("gated_rms_norm", "sigmoid_mul"),
    "delta_net.gate._delta_gates": ("delta_gates",),
    "embedding": ("embed",),
    "gemm": ("linear", "moe_ffn"),
    "handshake": ("rms_norm",),
    "handshake._copy_rows": ("submit", "wait"),
    "kv_pages": ("list_pages",),
    "kv_pages._load_kv_pages": ("load_pages",),
    "kv_pages._store_kv_rows": ("store_rows",),
    "page_blocks": (),  # beside steps
    "moe.router": ("router",),
    "moe.router_logits": ("linear", "router"),
    "moe.permute._rank_few": ("sort_routing",),
    "moe.permute._count": ("sort_routing",),
    "moe.permute._add_up": ("sort_routing",),
    "moe.permute._rank": ("sort_routing",),
    "moe.shared_factor": ("shared_factor",),
    "moe.split_routing": ("split_routing",),
    "moe.rank_experts": ("rank_experts",),
    "moe.tiles": ("unpack_experts",),
    "moe.tiles.gather": ("load_experts",),
    "moe": ("moe_ffn",),
    "activation": ("moe_ffn",),
    "norm": ("rms_norm",),
    "per_head_linear": ("per_head_linear",),
    "quantize": ("linear", "moe_ffn"),
    "rope": ("rope_table",),
    "rope_cache_write": ("mla_rope_cache_write", "gqa_rope_cache_write"),
    "sampling": ("sample_requests",),
    "sampling_kernels": ("sample_requests",),
}
"""Which ops launch the kernels of a module of ``pykernels.gpu``, or of a folder of modules; or one
of its kernels."""

TORCH = "torch"
"""The op of kernels that are not ours: torch's copies and conversions between ours."""

LOOKAHEAD = 40
"""Nodes: about two layers. A node farther away is not the next one."""

_PACKAGE = "pykernels.gpu."


def launched_by() -> Mapping[str, frozenset[str]]:
    """The ops that launch each kernel of all modules that are loaded, by its name."""
    launchers: dict[str, set[str]] = {}
    for module in [m for name, m in sys.modules.items() if name.startswith(_PACKAGE)]:
        for kernel in vars(module).values():
            function: Any = getattr(kernel, "fn", None)  # of Triton's and Gluon's decorators
            home = getattr(function, "__module__", None) or ""
            if home.startswith(_PACKAGE) and (ops := ops_of(f"{home}.{function.__name__}")):
                launchers.setdefault(function.__name__, set()).update(ops)
    return {name: frozenset(ops) for name, ops in launchers.items()}


def ops_of(kernel: str) -> tuple[str, ...]:
    """The ops that launch a kernel of a module, by the longest name in ``OPS_OF``."""
    name = kernel.removeprefix(_PACKAGE)
    while name and name not in OPS_OF:
        name = name.rpartition(".")[0]
    return OPS_OF.get(name, ())


def assigned(spans: Sequence[Span], nodes: Sequence[Node]) -> list[Span]:
    """The spans of one GPU, their ops and layers those of a program's nodes there, and its gaps.
    What a channel's ends launch (``partition``) are copies.

    Args:
        spans: in order of time, of one step or of several; the op of a kernel is its name.
        nodes: those of one step; behind the last one comes the first one again.
    """
    known = launched_by()
    spans_: list[Span] = []
    at, first, last, times = 0, "", "", 0
    for span in spans:
        if span.lane.kind != STREAM or span.op == COPY:
            spans_.append(span)
            continue
        launching = known.get(span.name)
        if launching is None:
            spans_.append(replace(span, op=TORCH, layer=_layer(nodes, at)))
            continue
        ahead = [(at + i) % len(nodes) for i in range(min(LOOKAHEAD, len(nodes)))]
        # The kernel that a node begins with belongs to the next one when it comes again; only
        # experts may begin with the same one twice, for gate and up and for down.
        most = 2 if nodes[at].op == "moe_ffn" and last == first else 1
        again = span.name == first and times >= most
        if again and len(ahead) > 1 and nodes[ahead[1]].op in launching:
            ahead = ahead[1:]
        nearest = next((i for i in ahead if nodes[i].op in launching), None)
        if nearest is None:
            spans_.append(replace(span, op=min(launching), layer=_layer(nodes, at)))
            continue
        if nearest != at or not first:
            at, first, times = nearest, span.name, 0
        last, times = span.name, times + (span.name == first)
        node = nodes[at]
        op = COPY if node.op in ("submit", "wait") else op_of(node)
        spans_.append(replace(span, op=op, layer=node.layer, detail=node.name))
    return [*spans_, *idle(spans_)]


def _layer(nodes: Sequence[Node], at: int) -> int | None:
    return nodes[at].layer if at < len(nodes) else None
