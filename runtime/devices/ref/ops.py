"""The ops of a program in float32 torch, by ``pykernels.ref`` where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pykernels import ref
from pykernels.ref.attention import attend
from pykernels.ref.router import split_routing as split_by_weight
from pykernels.ref.sampling.inputs import SamplingInputs

from ...experts.tiles import copy_experts, expert_tiles
from ...kv_cache.layout import cache_inputs
from ...program import Node
from ...program.ops import SAMPLING, SAMPLING_TABLES
from .collective_ops import COLLECTIVES
from .delta_net_ops import DELTA_NETS
from .memory import RefBuffers
from .pair_ops import PAIRS
from .partial_ops import PARTIAL, keys_values
from .row_ops import ROWS
from .weights import Dequantized

Op = Callable[[RefBuffers, Node], None]


def embed(m: RefBuffers, node: Node) -> None:
    table = m.weight(node, "table")
    ids, scale = m.read(node.inputs["ids"]), node.attr("scale")
    m.write(node.outputs["out"], ref.embed(ids, table).float() * scale)


def rms_norm(m: RefBuffers, node: Node) -> None:
    """The sum of x and the addends and its norm; of some of their rows where these are given."""
    weight = m.weight(node, "weight")
    rows = m.read(node.inputs["rows"]) if "rows" in node.inputs else slice(None)
    total = m.read(node.inputs["x"])[rows, : len(weight)]
    for name in node.series("add"):
        total = total + m.read(name)[rows]
    m.write(node.outputs["out"], ref.rms_norm(total, weight, node.attr("eps"))[0])
    if "sum" in node.outputs:
        m.write(node.outputs["sum"], total)


def post_norm(m: RefBuffers, node: Node) -> None:
    first, *others = (m.read(name) for name in node.series("add"))
    for other in others:
        first = first + other
    residual = m.read(node.inputs["x"]) if "x" in node.inputs else None
    weight, scale = m.weight(node, "weight"), m.optional(node, "scale")
    m.write(node.outputs["out"], ref.post_norm(first, weight, node.attr("eps"), residual, scale))


def softcap(m: RefBuffers, node: Node) -> None:
    m.write(node.outputs["x"], ref.softcap(m.read(node.inputs["x"]), node.attr("cap")))


def add(m: RefBuffers, node: Node) -> None:
    first, *others = (m.read(name) for name in node.series("x"))
    for other in others:
        first = first + other
    m.write(node.outputs["out"], first)


def linear(m: RefBuffers, node: Node) -> None:
    """x by a matrix, to columns of out from ``start`` on."""
    matrix, bias = m.weight(node, "weight"), m.optional(node, "bias")
    N, K = matrix.shape
    y = m.read(node.inputs["x"]).flatten(1)[:, :K] @ matrix.T  # [T, N]
    y = y if bias is None else y + bias
    start = node.attr("start")
    m.read(node.outputs["out"])[:, start : start + N] = y


def per_head_linear(m: RefBuffers, node: Node) -> None:
    """A matrix for each head, to the first numbers of each head of out."""
    heads, x = m.weight(node, "heads"), m.read(node.inputs["x"]).flatten(1)
    G, N, K = heads.shape
    x_head, out_head = node.attr("x_head"), node.attr("out_head")
    head_range = slice(node.attr("first"), node.attr("first") + G)
    x = x[:, : head_range.stop * x_head].unflatten(1, (-1, x_head))[:, head_range, :K]  # [T, G, K]
    y = torch.einsum("tgk,gnk->tgn", x, heads)
    out = m.read(node.outputs["out"]).flatten(1)[:, : head_range.stop * out_head]
    out.unflatten(1, (-1, out_head))[:, head_range, :N] = y


def rope_table(m: RefBuffers, node: Node) -> None:
    positions, frequencies = m.read(node.inputs["positions"]), m.weight(node, "frequencies")
    angles = positions.float()[:, None] * frequencies  # [T, R / 2]
    scale = node.attr("scale")
    m.write(node.outputs["out"], torch.stack([angles.cos() * scale, angles.sin() * scale], 1))


def mla_rope_cache_write(m: RefBuffers, node: Node) -> None:
    q, kv, table, slot_mapping = (
        m.read(node.inputs[name]) for name in ("q", "kv", "angles", "slot_mapping")
    )
    weight, interleaved = m.weight(node, "kv_norm"), node.attr("interleaved")
    NH, nope, L, R = node.attr("heads"), node.attr("nope"), len(weight), 2 * table.shape[2]
    start = node.attr("kv_start")
    latent, rope = kv[:, start : start + L + R].split([L, R], 1)
    latent = ref.rms_norm(latent, weight, node.attr("eps"))[0]
    rope = _rotated(rope[:, None], table, interleaved)[:, 0]
    cache = _cache(m, node)
    latents = cache["latent"]
    if "rope" in cache:  # E4M3
        ref.mla_write(latent, rope, slot_mapping, latents, cache["rope"], cache["latent_scale"])
    else:
        ref.mla_write(latent, rope, slot_mapping, latents[..., :L], latents[..., L:])
    q = q.flatten(1)[:, : NH * (nope + R)].unflatten(1, (NH, nope + R))[..., nope:]
    rotated = _rotated(q, table, interleaved)
    m.write(node.outputs["rotated"], torch.cat([rotated.new_zeros(len(q), NH, L), rotated], -1))


def gqa_rope_cache_write(m: RefBuffers, node: Node) -> None:
    qkv, table, slot_mapping = (
        m.read(node.inputs[name]) for name in ("qkv", "angles", "slot_mapping")
    )
    cache = _cache(m, node)
    NH, (KVH, D) = node.attr("heads"), cache["k"].shape[2:]
    qkv = qkv.flatten(1)
    parts = ((NH, 0), (KVH, node.attr("k_start")), (KVH, node.attr("v_start")))
    q, k, v = (qkv[:, start : start + n * D].unflatten(1, (n, D)) for n, start in parts)
    eps, interleaved = node.attr("eps"), node.attr("interleaved")
    q, k = (
        # A norm of a head, or of all heads together.
        ref.rms_norm(x.reshape(-1, len(weight)), weight, eps)[0].view_as(x)
        if (weight := m.optional(node, name)) is not None
        else x
        for name, x in (("q_norm", q), ("k_norm", k))
    )
    if node.attr("v_norm"):
        v = ref.rms_norm(v, v.new_ones(D), eps)[0]
    pages, scales = (cache["k"], cache["v"]), (cache.get("k_scale"), cache.get("v_scale"))
    ref.kv_write(_rotated(k, table, interleaved), v, slot_mapping, *pages, *scales)
    m.write(node.outputs["rotated"], _rotated(q, table, interleaved))


def attention(m: RefBuffers, node: Node) -> None:
    """Each sequence's tokens, which follow each other, over its pages."""
    NH, dk, dv = node.attr("heads"), node.attr("dk"), node.attr("dv")
    q = m.read(node.inputs["q"]).flatten(1).unflatten(1, (NH, dk))
    out = q.new_zeros(len(q), NH, dv)
    for at, pages, length in _sequences(m, node):
        keys, values = keys_values(m, node, pages, length)
        out[at] = attend(
            q[at],
            keys,
            values[..., :dv],
            scale=node.attr("scale"),
            window=node.attr("window") or None,
            sinks=m.optional(node, "sinks"),
        )
    m.write(node.outputs["out"], out)


def attention_expanded(m: RefBuffers, node: Node) -> None:
    """Latent attention of sequences with many tokens, by the keys and values of each head."""
    rotated, q = (m.read(node.inputs[name]) for name in ("q", "q_nope"))
    NH, dv, nope = node.attr("heads"), node.attr("dv"), node.attr("nope")
    rotated = rotated.flatten(1).unflatten(1, (NH, -1))
    uk, uv = (m.weight(node, name) for name in ("uk", "uv"))  # [NH, L, nope], [.., L]
    L, each = uv.shape[2], nope + rotated.shape[2] - uv.shape[2]
    q = q.flatten(1)[:, : NH * each].unflatten(1, (NH, each))[..., :nope]
    q = torch.cat([q, rotated[..., L:]], -1)
    out = m.read(node.outputs["out"]).view(len(q), NH, dv)
    for at, pages, length in _sequences(m, node):
        if len(at) < node.attr("expand_from"):
            continue
        latents = keys_values(m, node, pages, length)[0][:, 0]  # [length, L + R]
        keys = torch.einsum("kl,hln->khn", latents[:, :L], uk)
        keys = torch.cat([keys, latents[:, None, L:].expand(-1, NH, -1)], -1)
        values = torch.einsum("kl,hvl->khv", latents[:, :L], uv)
        out[at] = attend(q[at], keys, values, scale=node.attr("scale"))


def _sequences(m: RefBuffers, node: Node) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Each one's tokens that follow each other, its pages, and keys up to the last of them."""
    sequences, positions = (m.read(node.inputs[name]) for name in ("sequences", "positions"))
    table = m.full(node.inputs["page_table"])
    follows = (sequences.diff() == 0) & (positions.diff() == 1)
    (cuts,) = torch.where(~follows)
    tokens = torch.arange(len(sequences), dtype=torch.int64, device="cpu")
    for at in tokens.tensor_split(cuts + 1):
        sequence = int(sequences[at[0]])
        if sequence >= 0:
            yield at, table[sequence], int(positions[at[-1]]) + 1


def _cache(m: RefBuffers, node: Node) -> dict[str, torch.Tensor]:
    """The parts of the cache that a node reads, by their names."""
    return {part: m.full(name) for part, name in cache_inputs(node).items()}


def router(m: RefBuffers, node: Node) -> None:
    logits = m.read(node.inputs["logits"])[:, : node.attr("experts")]
    bias, factors = (m.optional(node, port) for port in ("bias", "factors"))
    chosen = ref.router(logits, node.attr("spec"), bias, factors=factors)
    ids = chosen.ids
    if "slot_mapping" in node.inputs:  # padding takes none
        ids = ids.masked_fill(m.read(node.inputs["slot_mapping"])[:, None] < 0, -1)
    m.write(node.outputs["ids"], ids)
    m.write(node.outputs["weights"], chosen.weights)


def split_routing(m: RefBuffers, node: Node) -> None:
    ids, factors = (m.read(node.inputs[name]) for name in ("ids", "weights"))
    whole = m.read(node.inputs["whole"]) if "whole" in node.inputs else None
    parts = split_by_weight(ids, factors, node.attr("last"), whole)
    for name, part in zip(("first_ids", "last_ids"), parts, strict=True):
        if name in node.outputs:
            m.write(node.outputs[name], part)


def place_routing(m: RefBuffers, node: Node) -> None:
    parts = ref.place_routing(m.read(node.inputs["ids"]), m.full(node.inputs["slots"]))
    for name, part in zip(("local_ids", "remote_ids"), parts, strict=True):
        m.write(node.outputs[name], part)


def rank_experts(m: RefBuffers, node: Node) -> None:
    experts, count = (len(m.full(node.outputs[name])) for name in ("slots", "order"))
    tables = ref.rank_experts(m.read(node.inputs["ids"]), experts, count)
    for name, table in zip(("slots", "order"), tables, strict=True):
        m.write(node.outputs[name], table)


def load_experts(m: RefBuffers, node: Node) -> None:
    first, count = node.attr("first"), node.attr("count")
    tiles = expert_tiles(m.program.weight(node, "experts"), count, m.full(node.outputs["out"]))
    held = m.whole_weight(node, "experts")
    if "order" not in node.inputs:
        copy_experts(held, first, count, tiles)
        return
    for i, expert in enumerate(m.read(node.inputs["order"])[first : first + count].tolist()):
        copy_experts(held, expert, 1, tiles, i)


def unpack_experts(m: RefBuffers, node: Node) -> None:
    """This device reads tiles: the piece goes to its place among those of the layer."""
    spec, count = m.program.weight(node, "experts"), node.attr("count")
    tiles = expert_tiles(spec, count, m.full(node.inputs["tiles"]))
    here = expert_tiles(spec, spec.shape[0], m.full(node.outputs["out"]))
    copy_experts(tiles, 0, count, here, node.attr("first"))


def moe_ffn(m: RefBuffers, node: Node) -> None:
    x = m.read(node.inputs["x"])
    if "ids" in node.inputs:
        ids, factors = (m.read(node.inputs[name]) for name in ("ids", "weights"))
    else:
        ids = torch.zeros(len(x), 1, dtype=torch.int64, device="cpu")
        factors = torch.ones(len(x), 1, dtype=torch.float32, device="cpu")
    if "resident" in node.inputs:
        spec = m.program.weight(node, "experts")
        here = expert_tiles(spec, spec.shape[0], m.full(node.inputs["resident"]))
        experts: Any = Dequantized(here, range(spec.shape[0]))
    else:
        experts = m.weight(node, "experts")
    y = ref.moe_ffn(x, ids, factors, experts, activations=node.attr("activations"))
    m.write(node.outputs["out"], y)


def join_rows(m: RefBuffers, node: Node) -> None:
    parts = [m.read(node.inputs[name]) for name in ("first", "last")]
    m.write(node.outputs["out"], torch.cat(parts))


def sample_requests(m: RefBuffers, node: Node) -> None:
    logits = m.read(node.inputs["logits"])
    inputs = SamplingInputs(
        **{
            "logprobs" if name == "num_logprobs" else name: m.read(node.inputs[name])
            for name in (*SAMPLING, *SAMPLING_TABLES)
        }
    )
    drawn = ref.sample(logits, inputs)
    assert inputs.seen is not None and inputs.seen_row is not None
    ref.count_tokens(drawn.tokens, inputs.seen_row, inputs.seen)
    for name, value in drawn._asdict().items():
        m.write(node.outputs[name], value)


OPS: dict[str, Op] = {**COLLECTIVES, **DELTA_NETS, **PARTIAL, **PAIRS, **ROWS} | {
    op.__name__: op
    for op in (
        embed,
        rms_norm,
        post_norm,
        softcap,
        add,
        linear,
        per_head_linear,
        rope_table,
        mla_rope_cache_write,
        gqa_rope_cache_write,
        attention,
        attention_expanded,
        router,
        split_routing,
        place_routing,
        rank_experts,
        load_experts,
        unpack_experts,
        moe_ffn,
        join_rows,
        sample_requests,
    )
}
"""By the names of nodes."""


def _rotated(x: torch.Tensor, table: torch.Tensor, interleaved: int) -> torch.Tensor:
    """x [T, heads, D] with its first numbers rotated by table [T, 2, R / 2]."""
    cos, sin = table[:, None, 0], table[:, None, 1]  # [T, 1, R / 2]
    R = 2 * cos.shape[-1]
    head, rest = x[..., :R], x[..., R:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    both = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([both, rest], -1)
