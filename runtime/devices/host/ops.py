"""The ops of a program in float32 torch, by ``pykernels.ref`` where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from pykernels import ref
from pykernels.ref.attention import attend, read_pages
from pykernels.ref.router import split_routing as split_by_weight
from pykernels.ref.sampling import Request, sample_requests

from ...kv_cache.layout import cache_inputs
from ...program import Node
from . import weights


class Memory(Protocol):
    """What ops read and write: the buffers of a step, as long as the step is."""

    requests: list[Request]

    def read(self, name: str) -> torch.Tensor:
        """A buffer's part that the step fills; of a cache and of page tables all."""

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets that part."""


Op = Callable[[Memory, Node], None]


def embed(m: Memory, node: Node) -> None:
    table = node.weights["table"]
    if not isinstance(table, torch.Tensor):
        table = weights.matrix(table)
    m.write(node.outputs[0], ref.embed(m.read(node.inputs[0]), table).float())


def rms_norm(m: Memory, node: Node) -> None:
    """The sum of the inputs and its norm; of the last input's rows where they are sampled."""
    names = list(node.inputs)
    rows = m.read(names.pop()) if node.attrs.get("sampled") else slice(None)
    weight, start = node.weights["weight"], node.attrs.get("start", 0)
    total = m.read(names[0])[rows, start : start + len(weight)]
    for name in names[1:]:
        total = total + m.read(name)[rows]
    m.write(node.outputs[0], ref.rms_norm(total, weight, node.attrs["eps"])[0])
    if len(node.outputs) > 1:
        m.write(node.outputs[1], total)


def linear(m: Memory, node: Node) -> None:
    """x by a matrix; to columns of out from ``start`` on, where out is as wide as ``width``."""
    packed, bias = node.weights["weight"], node.weights.get("bias")
    (out,), start = node.outputs, node.attrs.get("start", 0)
    y = m.read(node.inputs[0])[:, : packed.K] @ weights.matrix(packed).T  # [T, N]
    y = y if bias is None else y + bias
    if "width" not in node.attrs:
        m.write(out, y)
        return
    whole = m.read(out).clone() if out in node.inputs else y.new_zeros(len(y), node.attrs["width"])
    whole[:, start : start + packed.N] = y
    m.write(out, whole)


def heads(m: Memory, node: Node) -> None:
    """A matrix for each head; where the output is an input too, in the first numbers of a head."""
    packed = node.weights["heads"]
    x = m.read(node.inputs[0]).flatten(1)
    x_head, out_head = node.attrs["x_head"], node.attrs["out_head"]
    x = x[:, : packed.G * x_head].unflatten(1, (packed.G, x_head))[..., : packed.K]  # [T, G, K]
    y = torch.einsum("tgk,gnk->tgn", x, weights.heads(packed))
    (out,) = node.outputs
    if out in node.inputs:
        whole = m.read(out).reshape(-1, packed.G, out_head)
        y = torch.cat([y, whole[..., packed.N :]], -1)
    m.write(out, y)


def rope_table(m: Memory, node: Node) -> None:
    positions, frequencies = m.read(node.inputs[0]), node.weights["frequencies"].float()
    angles = positions.float()[:, None] * frequencies  # [T, R / 2]
    scale = node.attrs.get("scale", 1.0)
    m.write(node.outputs[0], torch.stack([angles.cos() * scale, angles.sin() * scale], 1))


def mla_write(m: Memory, node: Node) -> None:
    q, kv, table, slots = (m.read(name) for name in node.inputs)
    (out, *caches), attrs, weight = node.outputs, node.attrs, node.weights["weight"]
    NH, nope, L, R = attrs["heads"], attrs["nope"], len(weight), 2 * table.shape[2]
    start = attrs.get("kv_start", 0)
    latent, rope = kv[:, start : start + L + R].split([L, R], 1)
    latent = ref.rms_norm(latent, weight, attrs["eps"])[0]
    rope = _turned(rope[:, None], table, attrs["interleaved"])[:, 0]
    cache, *rest = (m.read(name) for name in caches)
    if rest:  # E4M3
        ref.mla_write(latent, rope, slots, cache, *rest)
    else:
        ref.mla_write(latent, rope, slots, cache[..., :L], cache[..., L:])
    q = q[:, : NH * (nope + R)].unflatten(1, (NH, nope + R))[..., nope:]
    turned = _turned(q, table, attrs["interleaved"])
    m.write(out, torch.cat([turned.new_zeros(len(q), NH, L), turned], -1))


def gqa_write(m: Memory, node: Node) -> None:
    qkv, table, slots = (m.read(name) for name in node.inputs)
    out, *caches = node.outputs
    NH, (KVH, D) = node.attrs["heads"], m.read(caches[0]).shape[2:]
    parts = ((NH, 0), (KVH, node.attrs["k_start"]), (KVH, node.attrs["v_start"]))
    q, k, v = (qkv[:, start : start + n * D].unflatten(1, (n, D)) for n, start in parts)
    eps, interleaved = node.attrs.get("eps", 0.0), node.attrs.get("interleaved", 0)
    q, k = (
        # A norm of a head, or of all heads together.
        ref.rms_norm(x.reshape(-1, len(weight)), weight, eps)[0].view_as(x)
        if (weight := node.weights.get(name)) is not None
        else x
        for name, x in (("q", q), ("k", k))
    )
    ref.kv_write(_turned(k, table, interleaved), v, slots, *(m.read(name) for name in caches))
    m.write(out, _turned(q, table, interleaved))


def attention(m: Memory, node: Node) -> None:
    """Each sequence's tokens, which follow each other, over its pages."""
    q, _, positions, sequences, table = (m.read(name) for name in node.inputs[:5])
    cache = {part: m.read(name) for part, name in cache_inputs(node).items()}
    attrs = node.attrs
    q = q.unflatten(-1, (attrs["heads"], attrs["dk"])) if q.ndim == 2 else q
    out = q.new_zeros(*q.shape[:2], attrs["dv"])
    for at, sequence, length in _sequences(sequences, positions):
        keys, values = _keys_values(cache, table[sequence], length)
        out[at] = attend(
            q[at], keys, values[..., : attrs["dv"]], scale=attrs["scale"],
            window=attrs.get("window") or None, sinks=node.weights.get("sinks"),
        )  # fmt: skip
    m.write(node.outputs[0], out)


def attention_expanded(m: Memory, node: Node) -> None:
    """Latent attention of sequences with many tokens, by the keys and values of each head."""
    turned, _, positions, sequences, table = (m.read(name) for name in node.inputs[:5])
    cache = {part: m.read(name) for part, name in cache_inputs(node).items()}
    q, out = (m.read(name) for name in node.inputs[-2:])
    attrs, (NH, dv) = node.attrs, (node.attrs["heads"], node.attrs["dv"])
    uk, uv = (weights.heads(node.weights[name]) for name in ("uk", "uv"))  # [NH, L, nope], [.., L]
    L, each = uv.shape[2], attrs["nope"] + turned.shape[2] - uv.shape[2]
    q = q[:, : NH * each].unflatten(1, (NH, each))[..., : attrs["nope"]]
    q, out = torch.cat([q, turned[..., L:]], -1), out.unflatten(-1, (NH, dv)).clone()
    for at, sequence, length in _sequences(sequences, positions):
        if len(at) < attrs["expand_from"]:
            continue
        latents = _keys_values(cache, table[sequence], length)[0][:, 0]  # [length, L + R]
        keys = torch.einsum("kl,hln->khn", latents[:, :L], uk)
        keys = torch.cat([keys, latents[:, None, L:].expand(-1, NH, -1)], -1)
        values = torch.einsum("kl,hvl->khv", latents[:, :L], uv)
        out[at] = attend(q[at], keys, values, scale=attrs["scale"])
    m.write(node.outputs[0], out.flatten(1))


def _sequences(
    sequences: torch.Tensor, positions: torch.Tensor
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Each one's tokens, in order, its row of the page table and its keys."""
    for sequence in sequences.unique().tolist():
        (at,) = torch.where(sequences == sequence)
        at = at[positions[at].argsort()]
        yield at, sequence, int(positions[at[-1]]) + 1


def _keys_values(
    cache: dict[str, torch.Tensor], table: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's, float32 [length, KVH, D]; a latent's values are the first part of its keys."""

    def rows(part: str) -> torch.Tensor:
        scales = cache.get(f"{part}_scale")
        return read_pages(cache[part], table, length, scales, torch.float32)

    if "k" in cache:
        return rows("k"), rows("v")
    latent = rows("latent")
    keys = torch.cat([latent, rows("rope")], -1) if "rope" in cache else latent
    return keys[:, None], keys[:, None]


def router(m: Memory, node: Node) -> None:
    chosen = ref.router(m.read(node.inputs[0]), node.attrs["spec"], node.weights.get("bias"))
    m.write(node.outputs[0], chosen.ids)
    m.write(node.outputs[1], chosen.weights)


def split_routing(m: Memory, node: Node) -> None:
    ids, factors = (m.read(name) for name in node.inputs)
    parts = split_by_weight(ids, factors, node.attrs["last"])
    for name, part in zip(node.outputs, parts, strict=False):
        m.write(name, part)


def moe_ffn(m: Memory, node: Node) -> None:
    x, *routing = (m.read(name) for name in node.inputs)
    if routing:
        ids, factors = routing
    else:
        ids = torch.zeros(len(x), 1, dtype=torch.int64, device="cpu")
        factors = torch.ones(len(x), 1, dtype=torch.float32, device="cpu")
    experts = weights.experts(node.weights["experts"])
    activations = node.attrs.get("activations", "bf16")
    m.write(node.outputs[0], ref.moe_ffn(x, ids, factors, experts, activations=activations))  # type: ignore[arg-type]


def sample(m: Memory, node: Node) -> None:
    logits = m.read(node.inputs[0])
    greedy = [Request(temperature=0.0, logprobs=-1)] * len(logits)
    found = sample_requests(logits, m.requests or greedy)
    for name, value in zip(node.outputs, found, strict=True):
        m.write(name, value)


OPS: dict[str, Op] = {
    op.__name__: op
    for op in (
        embed, rms_norm, linear, heads, rope_table, mla_write, gqa_write, attention,
        attention_expanded, router, split_routing, moe_ffn, sample,
    )
}  # fmt: skip
"""By the names of nodes."""


def _turned(x: torch.Tensor, table: torch.Tensor, interleaved: int) -> torch.Tensor:
    """x [T, heads, D] with its first numbers turned by table [T, 2, R / 2]."""
    cos, sin = table[:, None, 0], table[:, None, 1]  # [T, 1, R / 2]
    R = 2 * cos.shape[-1]
    head, rest = x[..., :R], x[..., R:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    both = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([both, rest], -1)
