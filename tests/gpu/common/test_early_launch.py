"""Chains of launches that begin before the kernel in front has ended: they wait for what they read.

The right bits are those of the same chain with each launch behind the end of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.common import launch
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.moe.permute import unpermute
from pykernels.gpu.moe.router import route
from pykernels.gpu.moe.router_logits import router_logits
from pykernels.gpu.norm import rms_norm
from pykernels.gpu.plans.attention import DecodePlan
from pykernels.gpu.rope import rope_frequencies, rope_table
from pykernels.gpu.rope_cache_write.gqa import gqa_rope_cache_write
from pykernels.gpu.rope_cache_write.mla import mla_rope_cache_write
from pykernels.quant import get_format
from pykernels.shapes import MoEShape, RouterSpec

from ..caches import BF16, make_cache
from ..moe.test_moe_ffn import random_experts
from ..replays import assert_replays_alike

ROUNDS = 12
LENGTHS = [3000, 70, 120]
Chain = Callable[[], torch.Tensor]
"""Writes and returns one buffer, [ROUNDS + 1, ...]: the first input and the result of each round,
which is the next round's input. It depends on nothing that another call has left."""


def check(chain: Chain, kernels: set[str]) -> None:
    """The same bits eagerly and replayed, again and again, as when each launch ends before the next
    one begins; ``kernels`` are among the launched."""
    run, names = JITFunction.run, []

    def run_and_wait(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        torch.cuda.synchronize()
        names.append(self.__name__)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run_and_wait)
        expected = chain().clone()
    assert kernels <= set(names) and len(names) >= 2 * ROUNDS
    assert expected.isfinite().all() and expected.flatten(1).any(1).all()
    assert_replays_alike(chain, expected, times=20)


def decode_chain(plan: DecodePlan, NH: int, KVH: int, fp8: bool, device: torch.device) -> Chain:
    """Queries rotated and a token written, attention; KVH 0: MLA, whose queries' first numbers are
    their rotated part too. Every second round's sequences are in one part."""
    mla, page, B = KVH == 0, 64, len(LENGTHS)
    D, R = (512, 64) if mla else (128, 128)
    tokens = [(D,), (R,)] if mla else [(KVH, D)] * 2
    cache = make_cache(
        [n + ROUNDS for n in LENGTHS], page, tokens, device, fp8=(fp8, fp8 and not mla)
    )
    positions = torch.tensor(LENGTHS) + torch.arange(ROUNDS)[:, None]
    pages = cache.table.cpu().gather(1, (positions // page).T).T
    slots = (pages * page + positions % page).contiguous().to(device)
    positions, before = positions.to(device), cache.lengths - ROUNDS
    each = [x for x in (*cache.values, *cache.scales) if x is not None]
    rows = [x.view(torch.uint8).view(x.shape[0] * page, -1) for x in each]
    q = torch.randn(B, NH, D).to(BF16).to(device)
    given = [torch.randn(ROUNDS, B, *shape).to(BF16).to(device) for shape in tokens]
    frequencies, outs = rope_frequencies(R).to(device), q.new_empty(ROUNDS + 1, *q.shape)
    angles = [rope_table(at, frequencies) for at in positions]
    joined = torch.cat([x.flatten(2) for x in given], -1)  # [ROUNDS, B, keys and values]
    qkv = torch.cat([q.new_empty(ROUNDS, B, NH * D), joined], -1)
    turned, ones = q.new_empty(B, NH, R if mla else D), torch.ones(D, device=device)
    scales = dict(zip(("k_scale", "v_scale"), cache.scales, strict=True))
    # Of GQA few keys have most of the weight: queries matter.
    how = {"scale": 0.5, "latent_scale": cache.scales[0]} if mla else {"scale": 1.0, **scales}

    def chain() -> torch.Tensor:
        cache.lengths.copy_(before)
        for x in rows:
            x.index_fill_(0, slots.flatten(), 0xFF)  # NaN in bfloat16, E4M3 and float32
        outs.fill_(float("nan"))
        outs[0].copy_(q)
        for i in range(ROUNDS):
            cache.lengths.add_(1)
            where = (*cache.values, cache.table, cache.lengths)
            last: dict[str, Any] = {
                **how,
                "out": outs[i + 1],
                "plan": replace(plan, ctas_per_sm=0) if i % 2 else plan,
            }
            to = angles[i], slots[i], *cache.values
            if mla:
                part, scale = outs[i, :, :, :R], cache.scales[0]
                mla_rope_cache_write(part, joined[i], *to, ones, scale, out=turned)
                mla_decode(outs[i], turned, *where, **last)
            else:
                qkv[i, :, : NH * D].copy_(outs[i].flatten(1))
                gqa_rope_cache_write(qkv[i], *to, *cache.scales, out=turned)
                gqa_decode(turned, *where, **last)
        return outs

    return chain


RING = DecodePlan(rows=16, keys=64, num_warps=4, num_stages=6, ring_buffer=True)
LANES = DecodePlan(rows=8, keys=128, num_warps=4, num_stages=1, ctas_per_sm=2, fp8_mma=True)
PLAIN = DecodePlan(rows=16, keys=64, num_warps=4, num_stages=3)
SPECIALIZED = DecodePlan(rows=64, keys=64, num_warps=8, num_stages=2, warp_specialized=True)
CASES = [
    (RING, 32, 8, False, {"gqa_decode_ring"}, "a ring, the last part adds up"),
    (RING, 64, 4, False, {"gqa_decode_ring", "_combine"}, "a ring, parts are combined"),
    (LANES, 32, 8, True, {"gqa_decode_fp8", "_combine"}, "in lanes, E4M3"),
    (PLAIN, 32, 8, False, {"_gqa_decode", "_combine"}, "tiles"),
    (SPECIALIZED, 128, 0, False, {"mla_decode_hopper", "mla_combine"}, "MLA"),
    (SPECIALIZED, 128, 0, True, {"mla_decode_hopper", "mla_combine"}, "MLA, E4M3"),
    (replace(PLAIN, num_warps=8), 16, 0, False, {"_mla_decode", "_combine"}, "MLA, 16 heads"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("plan", "NH", "KVH", "fp8", "kernels", "why"), CASES, ids=[row[-1] for row in CASES]
)
def test_decode_waits_for_queries_and_cache(
    plan: DecodePlan, NH: int, KVH: int, fp8: bool, kernels: set[str], why: str, device
) -> None:
    if launch.arch(device)[0] != 9:
        pytest.skip("the plans are Hopper's")
    write = "gqa_write" if KVH else "mla_write"
    check(decode_chain(plan, NH, KVH, fp8, device), kernels | {write})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128", "int8", "q4_k"])
def test_experts_wait_for_the_router(name: str, device: torch.device) -> None:
    """One token through layers: its experts are others in each."""
    shape = MoEShape(16, 1024, 512, 4)
    experts = random_experts(shape, get_format(name), device)
    x, weight = torch.randn(1, shape.H).to(BF16).to(device), torch.ones(shape.H, device=device)
    gate = (torch.randn(shape.E, shape.H) / shape.H**0.5).to(BF16).to(device)
    logits, spec = torch.zeros(1, shape.E, device=device), RouterSpec(shape.topk)
    held = route(logits, spec)
    normed, outs = torch.empty_like(x), x.new_empty(ROUNDS + 1, *x.shape)
    h, y = (x.new_empty(shape.topk, n) for n in (shape.I, shape.H))

    def chain() -> torch.Tensor:
        for scratch in (normed, h, y, outs):
            scratch.fill_(float("nan"))
        outs[0].copy_(x)
        for i in range(ROUNDS):
            rms_norm(outs[i], weight, 1e-6, out=(normed, None))
            router_logits(normed, gate, logits)
            routing, order, _ = route(logits, spec, out=held)
            fused_moe.gate_up(normed, experts, order, out=h)
            fused_moe.down(h, experts, order, out=y)
            unpermute(y, order, routing.weights, out=outs[i + 1])
        return outs

    check(chain, {"_rms_norm", "_route_one", "skinny_experts"})
