"""Latent attention as launches.

Tokens attend to the latents by the decode kernel, each as a sequence of its own, but for sequences
of many tokens in the step: their keys and values are expanded from the latents, a few heads at a
time where there are many keys, and attend by the prefill kernel. How many keys there are is known
on the host alone, so programs that expand are not captured.
"""

from __future__ import annotations

import torch

from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.attention.mla_prefill import mla_prefill
from pykernels.gpu.attention.mla_read import mla_read
from pykernels.gpu.per_head_linear import per_head_linear
from pykernels.shapes import Ragged

from ....kv_cache.layout import cache_inputs
from ....program.node import Node
from ..memory.buffers import EXPANDED_BYTES, GpuBuffers
from .dense import Launch, void


def attention(m: GpuBuffers, node: Node) -> Launch:
    heads, dk, dv = node.attr("heads"), node.attr("dk"), node.attr("dv")
    q = m.read(node, "q").view(-1, heads, dk)  # [T, NH, L + R]
    out = m.written(node, "out").view(-1, heads, dv)
    latent, rope, *rest = caches(m, node)
    scale, latent_scale = node.attr("scale"), rest[0] if rest else None

    def attend(rows: int, table: torch.Tensor, lengths: torch.Tensor) -> None:
        mla_decode(
            q[:rows, :, :dv],
            q[:rows, :, dv:],
            latent,
            rope,
            table[:rows],
            lengths[:rows],
            scale=scale,
            latent_scale=latent_scale,
            out=out[:rows],
        )

    lengths = m.optional(node, "token_lengths")
    if lengths is None:  # a decode step
        table, decode_lengths = m.read(node, "table"), m.read(node, "decode_lengths")
        return lambda: attend(len(table), table, decode_lengths)
    token_table, own, T = m.read(node, "token_table"), lengths, len(q)
    expansion = m.optional(node, "expansion")

    def launch() -> None:
        if rows := T if expansion is None else absorbed(expansion, T):
            attend(rows, token_table, own)

    return launch


def select_rows(m: GpuBuffers, node: Node) -> Launch:
    table, rows, out = m.read(node, "table"), m.read(node, "rows"), m.written(node, "out")
    return lambda: void(torch.index_select(table, 0, rows, out=out))


def absorbed(expansion: torch.Tensor, T: int) -> int:
    """Number of leading tokens that covers all non-expanded ones of a step: a power of two or T, so
    that few sizes are compiled.

    Args:
        expansion: see ``program.ops``; on the host.
    """
    tokens = int(expansion[0])
    return min(T, 1 << (tokens - 1).bit_length()) if tokens else 0


def attention_expanded(m: GpuBuffers, node: Node) -> Launch:
    heads, nope, dv = node.attr("heads"), node.attr("nope"), node.attr("dv")
    uk = m.weight(node, "uk")  # [NH, L, nope]
    uv = m.weight(node, "uv")  # [NH, dv, L]
    L = uv.shape[2]
    q_rope = m.read(node, "q").view(len(m.read(node, "q")), heads, -1)[..., L:]  # [T, NH, R]
    each = nope + q_rope.shape[2]
    q = m.read(node, "q_nope").flatten(1)[:, : heads * each].unflatten(1, (heads, each))
    q_nope, out = q[..., :nope], m.written(node, "out").view(-1, heads, dv)
    latent, rope, *rest = caches(m, node)
    scale, latent_scale = node.attr("scale"), rest[0] if rest else None
    starts, lengths = m.read(node, "chunk_starts"), m.read(node, "chunk_lengths")
    k_lengths, k_starts = m.read(node, "chunk_keys"), m.read(node, "chunk_rows")
    where = m.read(node, "chunk_table"), k_starts, k_lengths
    expansion = m.read(node, "expansion")  # on the host

    def launch() -> None:
        _, queries, keys = expansion.tolist()
        if not keys:
            return
        batch = Ragged(starts, lengths, k_lengths, queries, k_starts=k_starts)
        latents, ropes = mla_read(latent, rope, *where, keys, latent_scale)  # [keys, L], [keys, R]
        some = at_a_time(heads, keys * (nope + dv) * 2)
        for h in range(0, heads, some):
            of_heads = slice(h, h + some)
            rows = latents[:, None].expand(-1, some, -1)
            k = per_head_linear(rows, uk[of_heads].transpose(1, 2).contiguous())
            v = per_head_linear(rows, uv[of_heads])
            own = (q_nope[:, of_heads], q_rope[:, of_heads], k, ropes, v, batch)
            if some == heads:
                mla_prefill(*own, scale=scale, out=out)
            else:  # rows of other sequences stay as they are
                y = out[:, of_heads].contiguous()
                out[:, of_heads] = mla_prefill(*own, scale=scale, out=y)

    return launch


def at_a_time(heads: int, head_bytes: int) -> int:
    """Heads that are expanded together: a divisor of ``heads``, so that sizes are alike."""
    fits = max(1, EXPANDED_BYTES // head_bytes)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fits)


def per_head(m: GpuBuffers, node: Node) -> Launch:
    """``per_head_linear``: of tokens that are not expanded."""
    matrices = m.weight(node, "heads")  # [G, N, K]
    G, N, K = matrices.shape
    x_head, out_head = node.attr("x_head"), node.attr("out_head")
    heads = slice(node.attr("first"), node.attr("first") + G)
    x = m.read(node, "x").flatten(1)[:, : heads.stop * x_head].unflatten(1, (-1, x_head))
    out = m.written(node, "out").flatten(1)[:, : heads.stop * out_head].unflatten(1, (-1, out_head))
    x, out = x[:, heads, :K], out[:, heads, :N]
    expansion = m.optional(node, "expansion")
    if expansion is None:
        return lambda: void(per_head_linear(x, matrices, out))

    def launch() -> None:
        if rows := absorbed(expansion, len(x)):
            per_head_linear(x[:rows], matrices, out[:rows])

    return launch


def caches(m: GpuBuffers, node: Node) -> tuple[torch.Tensor, ...]:
    """(latents, their rotated parts, scales where they are E4M3) that a node reads or writes."""
    parts = cache_inputs(node)
    return tuple(
        m.tensor(parts[port]) for port in ("latent", "rope", "latent_scale") if port in parts
    )
