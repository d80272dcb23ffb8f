"""What torch makes of the attention cases: SDPA, plain products, flex attention.

Their inputs are dense and made beforehand, when a peer is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.timing.case import Call, rotating

BF16 = torch.bfloat16
Made = tuple[Callable[..., object], list[Any]]


def dense(x: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """What torch is given: [B, context, ...] in bf16."""
    return torch.stack([x[row.long()].flatten(0, 1)[:context].to(BF16) for row in table])


def lazily(make: Callable[[], Made]) -> Call:
    """A peer whose inputs are made when it is first called."""
    made: list[Call] = []

    def call() -> object:
        if not made:
            made.append(rotating(*make()))
        return made[0]()

    return call


def compiled_flex() -> Callable[..., Any]:
    """flex_attention for the shapes of one case.

    Without what was compiled for the cases before: from the eighth on, torch would no longer
    compile but call it eagerly. In this process: others take longer to start than a kernel takes.
    """
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    config.compile_threads = 1
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def mla_decode_peers(rotated: list[Any], K: int, scale: float) -> dict[str, Call]:
    """Heads as torch's queries, so that the latents need not be repeated for each."""

    def make() -> Made:
        sets = []
        for q, q_rope, latent, rope, table, *_ in rotated:
            v = dense(latent, table, K)[:, None]
            k = torch.cat([v, dense(rope, table, K)[:, None]], -1)  # [B, 1, K, L + R]
            sets.append((torch.cat([q, q_rope], -1)[:, None], k, v))
        return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale)), sets

    def products() -> Made:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = (q @ k.transpose(-1, -2)).float() * scale
            return torch.softmax(scores, -1).to(BF16) @ v

        return run, make()[1]

    return {"torch sdpa": lazily(make), "torch matmul": lazily(products)}


def gqa_decode_peers(rotated: list[Any], K: int, KVH: int) -> dict[str, Call]:
    def sets() -> list[Any]:
        return [
            (q[:, :, None], *(dense(x, table, K).transpose(1, 2).contiguous() for x in (k, v)))
            for q, k, v, table, *_ in rotated
        ]

    def sdpa() -> Made:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return run, sets()

    def grouped() -> Made:
        """The query heads of a KV head as that head's queries: K and V are read once."""

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q[:, :, 0].unflatten(1, (KVH, -1)), k, v)

        return run, sets()

    def flex() -> Made:
        compiled = compiled_flex()
        return (lambda q, k, v: compiled(q, k, v, enable_gqa=True)), sets()

    return {
        "torch sdpa": lazily(sdpa),
        "torch sdpa grouped": lazily(grouped),
        "torch flex": lazily(flex),
    }


def prefill_peers(rotated: list[Any], B: int, Q: int, K: int, window: int) -> dict[str, Call]:
    """SDPA's own choice, cuDNN's and flex; with a prefix the mask starts at the lower right."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    def heads_first(x: torch.Tensor, T: int) -> torch.Tensor:
        return x.unflatten(0, (B, T)).transpose(1, 2).contiguous()

    def sets() -> list[Any]:
        peers = []
        for given in rotated:
            if len(given) == 6:
                q_nope, q_rope, k_nope, k_rope, v, _ = given
                q = torch.cat([q_nope, q_rope], -1)
                k = torch.cat([k_nope, k_rope[:, None].expand(-1, q.shape[1], -1)], -1)
            else:
                q, k, v, _ = given
            peers.append((heads_first(q, Q), heads_first(k, K), heads_first(v, K)))
        return peers

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        if Q == K:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        mask = causal_lower_right(Q, K)
        if grouped:  # that mask takes no groups
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(q, k, v)

    def flex() -> Made:
        from torch.nn.attention.flex_attention import create_block_mask

        past, width = K - Q, window or K

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j <= i + past) & (j > i + past - width)

        mask = create_block_mask(mask_mod, None, None, Q, K, device=rotated[0][0].device)
        compiled = compiled_flex()

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            return compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

        return run, sets()

    if window:
        return {"torch flex": lazily(flex)}
    peers = {"torch sdpa": lazily(lambda: (attend, sets()))}
    if Q == K:
        peers["torch cudnn"] = lazily(lambda: (cudnn, sets()))
    if K == 8192:
        peers["torch flex"] = lazily(flex)
    return peers
