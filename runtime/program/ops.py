"""The op table: what each op of a program reads, writes and takes, by name.

A device has a function for each op that it runs; ``checks`` holds every node against its row here.
A row gives for each input, output and weight the dimensions and the class of dtype. Dimensions are
names, numbers, or sums of products of both ("heads*nope + 2*half"); a name has one value in a node,
which a weight, an attribute of that name or the first buffer that has it decides; ">N" takes N or
more (what a buffer holds behind the first N numbers is not for the node). The last dimension stands
for all that the buffer has left: [T, heads*dk] takes [T, heads, dk].

An op that updates a buffer in place has it under one name in its inputs and its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pykernels.ref.sampling import MAX_LOGPROBS

from .op_table.channels import CHANNELS
from .op_table.collectives import COLLECTIVES
from .op_table.delta_nets import DELTA_NETS
from .op_table.metadata import (
    METADATA,
    METADATA_OPS,
    ORDER,
    RAGGED,
    SEQUENCES,
    order_rule,
    sequences_rule,
)
from .op_table.op import Attr, Op, Port
from .op_table.pairs import PAIRS
from .op_table.rows import ROWS
from .op_table.sandwich import SANDWICH

COPIES = "copies"
"""The stream of nodes that only move bytes to a device, which it does beside all other nodes."""


def _activation(*dims: str, optional: bool = False, repeated: bool = False) -> Port:
    return Port("activation", dims, optional, repeated)


def _float32(*dims: str, optional: bool = False) -> Port:
    return Port("float32", dims, optional)


def _index(*dims: str, optional: bool = False) -> Port:
    return Port("index", dims, optional)


def _weight(*dims: str, optional: bool = False, repeated: bool = False) -> Port:
    return Port("", dims or None, optional, repeated)


def _bytes(*dims: str, optional: bool = False) -> Port:
    return Port("bytes", dims, optional)


_STREAMED = {"streamed": Port("bytes", ("slot_bytes",), True)}
"""Where matrices are that ``load_weights`` has brought, of an op that reads them from there."""


def _kv(*dims: str, optional: bool = False) -> Port:
    return Port("kv", ("pages", "page", *dims), optional, paged=True)


def _scale(*dims: str) -> Port:
    return Port("float32", ("pages", "page", *dims), True, paged=True)


_LATENT = {
    # bfloat16 [.., L + R] in one, or E4M3 with the rotated part and the scales apart
    "latent": _kv(">L"),
    "rope": _kv("2*half", optional=True),
    "latent_scale": _scale(),
}
_GROUPED = {
    "k": _kv("kv_heads", "D"),
    "v": _kv("kv_heads", "D"),
    "k_scale": _scale("kv_heads"),
    "v_scale": _scale("kv_heads"),
}
# What each row of logits asks for, a column a parameter. What is as long as the vocabulary or a
# list lies in tables that all rows share and that stay where they are from step to step; a row
# has a row of a table, or a part of a list.
_SAMPLING = {
    "temperature": _float32("R"),
    "top_k": _index("R"),
    "top_p": _float32("R"),
    "min_p": _float32("R"),
    "repetition": _float32("R"),
    "presence": _float32("R"),
    "frequency": _float32("R"),
    "seed": _index("R"),
    "draws": _index("R"),
    "num_logprobs": _index("R"),
    "seen_row": _index("R"),  # -1: no penalties
    "bias_start": _index("R"),
    "bias_count": _index("R"),
    "mask_row": _index("R"),  # -1: every token may be drawn
}
_SAMPLING_TABLES = {
    # Twice how often a token is in the output, and 1 more if it is in the prompt.
    "seen": Port("int32", ("seen_rows", "V")),
    "bias_ids": Port("int32", ("biases",)),
    "bias": _float32("biases"),
    "mask": Port("int32", ("mask_rows", "words")),  # token v: bit v % 32 of word v / 32
}


def _optional(ports: Mapping[str, Port]) -> dict[str, Port]:
    return {name: replace(port, optional=True) for name, port in ports.items()}


_ANY_CACHE = _optional(
    {name: replace(port, dims=None) for name, port in {**_GROUPED, **_LATENT}.items()}
)
_HEADS = {"heads": Attr(int), "kv_heads": Attr(int), "dk": Attr(int), "dv": Attr(int)}
# The result for some of the keys, and the logarithm of the sum of their exponentials; where both
# are inputs, those keys join the ones before.
_PARTIAL = {"out": _activation("T", "heads*dv"), "lse": _float32("T", "heads")}


def _rms_norm_rule(node: Mapping[str, Any]) -> str | None:
    if "rows" not in node and node["M"] != node["T"]:
        return f"x has {node['M']} rows, out {node['T']}, and no `rows` says which"
    return None


def _per_head_rule(node: Mapping[str, Any]) -> str | None:
    if node.get("expand_from", 0) and "sequences" not in node and "expansion" not in node:
        return "`expand_from` needs the input `sequences`"
    if node["K"] > node["x_head"] or node["N"] > node["out_head"]:
        return f"heads of [{node['N']}, {node['K']}] are wider than x_head or out_head"
    return None


def _attention_rule(node: Mapping[str, Any]) -> str | None:
    if ("k" in node) == ("latent" in node):
        return "it reads either keys and values or latents"
    if ("k" in node) != ("v" in node):
        return "`k` and `v` come together"
    return None


def _ragged_attention_rule(node: Mapping[str, Any]) -> str | None:
    return _attention_rule(node) or sequences_rule(node)


def _router_rule(node: Mapping[str, Any]) -> str | None:
    if node["topk"] != node["spec"].topk:
        return f"its ids hold {node['topk']} experts of a token, its spec {node['spec'].topk}"
    return order_rule(node)


def _experts_rule(node: Mapping[str, Any]) -> str | None:
    first, count, E = node["first"], node["count"], node["E"]
    if not 0 <= first < first + count <= E:
        return f"{count} experts from {first} on are not all among {E}"
    return None


def _moe_rule(node: Mapping[str, Any]) -> str | None:
    if ("ids" in node) != ("weights" in node):
        return "`ids` and `weights` come together"
    if "ids" not in node and node["E"] != 1:
        return f"{node['E']} experts and no routing"
    return order_rule(node)


OPS: dict[str, Op] = {
    **METADATA_OPS,
    **DELTA_NETS,
    **SANDWICH,
    **ROWS,
    **PAIRS,
    # Rows of the table of embeddings, times `scale`.
    "embed": Op(
        inputs={"ids": _index("T")},
        outputs={"out": _activation("T", "H")},
        weights={"table": _weight("V", "H")},
        attrs={"scale": Attr(float, 1.0)},
    ),
    # sum = x + add0 + add1 + ...; out = its norm. With `rows`: of these rows of x and the addends.
    "rms_norm": Op(
        inputs={
            "x": _activation("M", ">H"),
            "add": _activation("M", "H", repeated=True),
            "rows": _index("T", optional=True),
        },
        outputs={"out": _activation("T", "H"), "sum": _float32("T", "H", optional=True)},
        weights={"weight": _weight("H")},
        attrs={"eps": Attr(float)},
        rule=_rms_norm_rule,
    ),
    # x W^T + bias, into the columns of out from `start` on; the others stay where out is an input.
    "linear": Op(
        inputs={
            "x": _activation("T", ">K"),
            "out": _activation("T", ">start + N", optional=True),
            **_STREAMED,
        },
        outputs={"out": _activation("T", ">start + N")},
        weights={"weight": _weight("N", "K"), "bias": _weight("N", optional=True)},
        attrs={"start": Attr(int, 0), "activations": Attr(str, "bf16")},
    ),
    # A matrix for each head h, from `first` on: numbers h * x_head .. + K of x to h * out_head ..
    # + N of out; the others stay where out is an input. Tokens of sequences with `expand_from` or
    # more in the step (0: none) are left out.
    "per_head_linear": Op(
        inputs={
            "x": _activation("T", ">first*x_head + G*x_head"),
            "out": _activation("T", ">first*out_head + G*out_head", optional=True),
            "sequences": _index("T", optional=True),
            "expansion": METADATA["expansion"],
            **_STREAMED,
        },
        outputs={"out": _activation("T", ">first*out_head + G*out_head")},
        weights={"heads": _weight("G", "N", "K")},
        attrs={
            "x_head": Attr(int),
            "out_head": Attr(int),
            "first": Attr(int, 0),
            "expand_from": Attr(int, 0),
        },
        rule=_per_head_rule,
    ),
    # cos and sin of each position's angles, times `scale`.
    "rope_table": Op(
        inputs={"positions": _index("T")},
        outputs={"out": _float32("T", "2", "half")},
        weights={"frequencies": _weight("half")},
        attrs={"scale": Attr(float, 1.0)},
    ),
    # Norm of the latent, rope of it and of the queries, and the latent into its cache slots. The
    # queries go to numbers L .. of each head of `rotated`. A cache that is no input is new memory,
    # of which nothing but these slots is read.
    "mla_rope_cache_write": Op(
        inputs={
            "q": _activation("T", ">heads*nope + 2*heads*half"),
            "kv": _activation("T", ">kv_start + L + 2*half"),
            "angles": _float32("T", "2", "half"),
            "slot_mapping": _index("T"),
            **_optional(_LATENT),
        },
        outputs={"rotated": _activation("T", "heads*L + 2*heads*half"), **_LATENT},
        weights={"kv_norm": _weight("L")},
        attrs={
            "heads": Attr(int),
            "nope": Attr(int),
            "eps": Attr(float),
            "interleaved": Attr(int, 0),
            "kv_start": Attr(int, 0),
        },
    ),
    # Norms of queries and keys (of a head, or of all) and, with `v_norm`, of values (of a head,
    # without a weight), rope, and keys and values into their slots. A row holds queries from 0 on,
    # keys from k_start and values from v_start on, which may be the same numbers.
    "gqa_rope_cache_write": Op(
        inputs={
            "qkv": _activation("T", ">v_start + kv_heads*D"),
            "angles": _float32("T", "2", "half"),
            "slot_mapping": _index("T"),
            **_optional(_GROUPED),
        },
        outputs={"rotated": _activation("T", "heads*D"), **_GROUPED},
        weights={"q_norm": _weight(optional=True), "k_norm": _weight(optional=True)},
        attrs={
            "heads": Attr(int),
            "k_start": Attr(int),
            "v_start": Attr(int),
            "v_norm": Attr(int, 0),
            "eps": Attr(float, 0.0),
            "interleaved": Attr(int, 0),
        },
    ),
    # Causal attention of each sequence over its pages, of keys and values or of latents (whose
    # values are their first dv numbers). Sequences with `expand_from` tokens or more are left out.
    "attention": Op(
        inputs={
            "q": _activation("T", "heads*dk"),
            **SEQUENCES,
            **_ANY_CACHE,
        },
        outputs={"out": _activation("T", "heads*dv")},
        weights={"sinks": _weight("heads", optional=True)},
        attrs={
            **_HEADS,
            "scale": Attr(float),
            "window": Attr(int, 0),
            "expand_from": Attr(int, 0),
            "chunk": Attr(int, 0),  # tokens of a chunk at most
        },
        rule=_ragged_attention_rule,
    ),
    # The same over the keys of a step's tokens, which lie one behind the other in pages, those of
    # this rank or of another one; -1 is no sequence.
    "attention_block": Op(
        inputs={
            "q": _activation("T", "heads*dk"),
            "positions": _index("T"),
            "sequences": _index("T"),
            "key_positions": _index("keys"),
            "key_sequences": _index("keys"),
            **_ANY_CACHE,
            **_optional(_PARTIAL),
        },
        outputs=_PARTIAL,
        attrs={**_HEADS, "scale": Attr(float), "window": Attr(int, 0)},
        rule=_attention_rule,
    ),
    # The same over the keys that a sequence has had before the step, of which each token says how
    # many there are.
    "attention_prefix": Op(
        inputs={
            "q": _activation("T", "heads*dk"),
            "positions": _index("T"),
            "sequences": _index("T"),
            "prefix_lengths": _index("T"),
            "page_table": RAGGED["page_table"],
            **_ANY_CACHE,
        },
        outputs=_PARTIAL,
        weights={"sinks": _weight("heads", optional=True)},
        attrs={**_HEADS, "scale": Attr(float), "window": Attr(int, 0)},
        rule=_attention_rule,
    ),
    # Rows of a step's tokens, as they lie one behind the other in pages, to their cache slots.
    "cache_write": Op(
        inputs={
            "rows": Port("kv", None, repeated=True),
            "cache": Port("kv", None, repeated=True),
            "slot_mapping": _index("T"),
        },
        outputs={"cache": Port("kv", None, repeated=True)},
    ),
    # Latent attention of the sequences that `attention` leaves out, with the keys and values of
    # each head expanded.
    "attention_expanded": Op(
        inputs={
            "q": _activation("T", ">heads*L"),
            "q_nope": _activation("T", ">heads*nope"),
            "out": _activation("T", "heads*dv"),
            **SEQUENCES,
            "latent": _LATENT["latent"],
            "rope": _kv("R", optional=True),
            "latent_scale": _LATENT["latent_scale"],
            **_STREAMED,
        },
        outputs={"out": _activation("T", "heads*dv")},
        weights={"uk": _weight("heads", "L", "nope"), "uv": _weight("heads", "dv", "L")},
        attrs={
            "heads": Attr(int),
            "nope": Attr(int),
            "dv": Attr(int),
            "scale": Attr(float),
            "expand_from": Attr(int),
        },
        rule=sequences_rule,
    ),
    # The topk experts of each token and their weights, times the experts' `factors`; none (-1) of
    # tokens whose slot is -1, where slots are given. Of one token their order too.
    "router": Op(
        inputs={
            "logits": _float32("T", ">experts"),
            "slot_mapping": _index("T", optional=True),
        },
        outputs={"ids": _index("T", "topk"), "weights": _float32("T", "topk"), **ORDER},
        weights={
            "bias": _weight("experts", optional=True),
            "factors": _weight("experts", optional=True),
        },
        attrs={"spec": Attr(object), "experts": Attr(int)},
        rule=_router_rule,
    ),
    # Each token's choice in two parts, the `last` smallest weights in the second one, which may be
    # dropped; where `whole` is not 0 all are in the first one. An expert keeps its place, and is -1
    # (not here) in the other part: the weights stay.
    "split_routing": Op(
        inputs={
            "ids": _index("T", "topk"),
            "weights": _float32("T", "topk"),
            "whole": _index("T", optional=True),
        },
        outputs={
            "first_ids": _index("T", "topk"),
            "last_ids": _index("T", "topk", optional=True),
        },
        attrs={"last": Attr(int)},
    ),
    # Each token's choice in two parts: the slots of the experts that have one, and the ids of the
    # others. An expert keeps its place, and is -1 in the other part: the weights stay. The table
    # may change between steps; -1 in it is no slot.
    "place_routing": Op(
        inputs={"ids": _index("T", "topk"), "slots": Port("int32", ("experts",))},
        outputs={"local_ids": _index("T", "topk"), "remote_ids": _index("T", "topk")},
    ),
    # The experts that most tokens take: the place of each of all among them, -1 for no place, and
    # them in order.
    "rank_experts": Op(
        inputs={"ids": _index("T", "topk")},
        outputs={"slots": Port("int32", ("experts",)), "order": Port("int32", ("ranked",))},
    ),
    # Copies experts first .. first + count (or order[first:..]) of a layer as they are stored in
    # main memory, except `without`. Where out is an input, its memory is used again.
    "load_experts": Op(
        inputs={
            "out": _bytes("bytes", optional=True),
            "order": Port("int32", ("ranked",), optional=True),
        },
        outputs={"out": _bytes("bytes")},
        weights={"experts": _weight("E", "H", "I")},
        attrs={"first": Attr(int), "count": Attr(int), "without": Attr(tuple, ())},
        rule=_experts_rule,
        stream=COPIES,
    ),
    # The same experts as the device's moe_ffn reads them; the layer's others stay where out is an
    # input.
    "unpack_experts": Op(
        inputs={"tiles": _bytes("tile_bytes"), "out": _bytes("bytes", optional=True)},
        outputs={"out": _bytes("bytes")},
        weights={"experts": _weight("E", "H", "I")},
        attrs={"first": Attr(int), "count": Attr(int), "without": Attr(tuple, ())},
        rule=_experts_rule,
    ),
    # Matrices of a layer, as they lie in main memory in the device's own layout, brought to the
    # device one behind the other. Where out is an input, its memory is used again.
    "load_weights": Op(
        inputs={"out": _bytes("slot_bytes", optional=True)},
        outputs={"out": _bytes("slot_bytes")},
        weights={"weight": _weight(repeated=True)},
        stream=COPIES,
    ),
    # Experts of each token, weighted and summed; -1 is not here and adds nothing. Without routing
    # there is one expert, of all tokens. Where `resident` is given, experts are read from there.
    "moe_ffn": Op(
        inputs={
            "x": _activation("T", "H"),
            "ids": _index("T", "topk", optional=True),
            "weights": _float32("T", "topk", optional=True),
            **ORDER,
            "resident": _bytes("bytes", optional=True),
            **_STREAMED,
        },
        outputs={"out": _activation("T", "H")},
        weights={"experts": _weight("E", "H", "I")},
        attrs={"activations": Attr(str, "bf16")},
        rule=_moe_rule,
    ),
    # The sum of its inputs, in their order.
    "add": Op(
        inputs={"x": _activation("T", "H", repeated=True)},
        outputs={"out": _activation("T", "H")},
    ),
    # One token of each row of logits, by the row's own parameters (``SamplingInputs`` of
    # ``ref.sampling.inputs``), which is then counted in the row of `seen` that it has, if any: so a
    # next step's penalties know it before the host does. It waits until `masks_written` is 1.
    "sample_requests": Op(
        inputs={
            "logits": _float32("R", "V"),
            **_SAMPLING,
            **_SAMPLING_TABLES,
            "masks_written": _index("1", optional=True),
        },
        outputs={
            "seen": _SAMPLING_TABLES["seen"],
            "tokens": _index("R"),
            "logprobs": _float32("R"),
            "top_ids": _index("R", str(MAX_LOGPROBS)),
            "top_logprobs": _float32("R", str(MAX_LOGPROBS)),
        },
    ),
    **CHANNELS,
    **COLLECTIVES,
}
"""Ops by name. An op is the same function in ``pykernels.ref`` and on every device."""

SAMPLING = tuple(_SAMPLING)
"""Inputs of ``sample_requests`` that have a number for each row of logits."""
SAMPLING_TABLES = tuple(_SAMPLING_TABLES)
"""The inputs that rows share."""
