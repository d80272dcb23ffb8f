"""Attention: decode over paged caches and causal prefill, against torch on the same shapes.

Torch's peers get their cache gathered beforehand (dense, bf16), which is work that ours does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.harness.timing.case import Call, Case, Entry, rotating, sets_for
from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.gqa_prefill import gqa_prefill
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.attention.mla_prefill import mla_prefill
from pykernels.shapes import Ragged

from . import truth
from .attention_size import Size
from .peers import attention_flashinfer as flashinfer
from .peers.attention_torch import gqa_decode_peers, lazily, mla_decode_peers, prefill_peers

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE = 64
L, R, D_MLA = 512, 64, 128
MLA_SCALE = (D_MLA + R) ** -0.5

SIZES = (
    Size("mla_decode", 1, 8192),
    Size("mla_decode", 1, 65536),
    Size("mla_decode", 4, 32768),
    Size("mla_decode", 8, 8192),
    Size("mla_decode", 8, 65536),
    Size("mla_decode", 1, 65536, format="fp8"),
    Size("mla_decode", 8, 32768, heads=64),
    Size("mla_decode", 1, 65536, heads=16),
    Size("mla_decode", 8, 32768, heads=16),
    Size("mla_decode", 8, 32768, heads=16, format="fp8"),
    Size("gqa_decode", 1, 32768, heads=32, kv_heads=8),
    Size("gqa_decode", 8, 32768, heads=32, kv_heads=8),
    Size("gqa_decode", 8, 32768, heads=64, kv_heads=4),
    Size("gqa_decode", 8, 8192, heads=96, kv_heads=8),
    Size("gqa_decode", 8, 32768, heads=32, kv_heads=8, format="fp8"),
    Size("gqa_decode", 8, 32768, heads=32, kv_heads=8, window=4096),
    Size("gqa_decode", 8, 32768, heads=16, kv_heads=8, head_dim=256),
    Size("mla_prefill", 1, 8192, heads=32),
    Size("mla_prefill", 1, 32768, heads=16, new=2048),
    Size("gqa_prefill", 1, 8192, heads=32, kv_heads=8),
    Size("gqa_prefill", 4, 2048, heads=32, kv_heads=8),
    Size("gqa_prefill", 1, 8192, heads=64, kv_heads=8, head_dim=64),
    Size("gqa_prefill", 1, 8192, heads=16, kv_heads=4, head_dim=256),
    Size("gqa_prefill", 1, 32768, heads=16, kv_heads=4, new=2048),
    Size("gqa_prefill", 1, 16384, heads=32, kv_heads=8, window=4096),
    Size("gqa_prefill", 1, 8192, heads=32, kv_heads=8, keys="pages"),
    Size("gqa_prefill", 1, 8192, heads=32, kv_heads=8, format="fp8", keys="pages"),
)
QUICK = (0, 1, 3, 4, 10, 11, 17, 19)


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """The table's rows."""
    return (entry.case(device) for entry in table(quick))


def table(quick: bool = False) -> Iterator[Entry]:
    """``SIZES``, or those of a quick run."""
    for i, size in enumerate(SIZES):
        if not quick or i in QUICK:
            sizes = "-".join(f"{key}{value}" for key, value in size.params.items())
            yield Entry("attention", f"{size.kind}-{sizes}", functools.partial(build, size))


def case(device: torch.device, **flags: Any) -> Case:
    """One case: ``Size``'s fields as flags."""
    return build(Size(**{"kind": "mla_decode", **flags}), device)


def build(size: Size, device: torch.device, peers: bool = True) -> Case:
    """The case of a size. Its call takes a launch plan as ``plan=``."""
    make = _decode if size.decode else _prefill
    return make(size, device, peers)


def planned(size: Size, device: torch.device) -> tuple[Callable[[Any], object], int]:
    """(a size's call, which takes a plan, input sets it rotates over)."""
    case = build(size, device, peers=False)
    run: Callable[..., object] = case.run
    return lambda plan: run(plan=plan), case.sets


def pages(size: Size, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A page table of pages in random order, and the lengths."""
    each = -(-size.context // PAGE)
    table = torch.randperm(size.batch * each, device=device, dtype=torch.int32)
    lengths = torch.full((size.batch,), size.context, dtype=torch.int32, device=device)
    return table.view(size.batch, each), lengths


def cache(table: torch.Tensor, token: tuple[int, ...], size: Size, fp8: bool) -> tuple[Any, Any]:
    """Random pages and their scales (None in bf16)."""
    shape = (table.numel(), PAGE, *token)
    if not fp8:
        return torch.randn(shape, dtype=BF16, device=table.device), None
    codes = torch.randn(shape, dtype=BF16, device=table.device).to(FP8)
    return codes, torch.rand(shape[:-1], device=table.device) + 0.5


def _decode(size: Size, device: torch.device, peers: bool) -> Case:
    B, K, NH, fp8 = size.batch, size.context, size.heads, size.format == "fp8"
    S, mla = size.queries, size.mla
    KVH, D = (1, L) if mla else (size.kv_heads, size.head_dim)
    if mla:
        a_token = L * (1 if fp8 else 2) + R * 2 + 4 * fp8
        a_pair = L + R + L
    else:
        a_token = 2 * KVH * (D * (1 if fp8 else 2) + 4 * fp8)
        a_pair = 2 * D
    flops = 2 * B * NH * size.pairs * a_pair
    nbytes = B * size.keys_read * a_token + 2 * B * S * NH * a_pair  # as many inputs and results
    rows = (B, NH) if S == 1 else (B, S, NH)
    sets = sets_for(nbytes, device)

    def inputs() -> tuple[Any, ...]:
        table, lengths = pages(size, device)
        tokens, fp8s = ([(L,), (R,)], (fp8, False)) if mla else ([(KVH, D)] * 2, (fp8, fp8))
        made = [
            cache(table, token, size, narrow) for token, narrow in zip(tokens, fp8s, strict=True)
        ]
        widths = (L, R) if mla else (D,)
        q = [torch.randn(*rows, n, dtype=BF16, device=device) for n in widths]
        out = torch.empty(*rows, D, dtype=BF16, device=device)
        return (*q, *(x for x, _ in made), table, lengths, [s for _, s in made], out)

    def run(*given: Any, plan: Any = None) -> torch.Tensor:
        *tensors, scales, out = given
        options: dict[str, Any] = {"out": out, "plan": plan, "max_length": K}
        if mla:
            return mla_decode(*tensors, scale=MLA_SCALE, latent_scale=scales[0], **options)
        options |= {"k_scale": scales[0], "v_scale": scales[1], "window": size.window or None}
        return gqa_decode(*tensors, scale=D**-0.5, **options)

    rotated = [inputs() for _ in range(sets)]
    others: dict[str, Call] = {}
    if peers and S == 1 and not fp8 and not size.window:
        others = (
            mla_decode_peers(rotated, K, MLA_SCALE) if mla else gqa_decode_peers(rotated, K, KVH)
        )
        others[flashinfer.NAME] = lazily(
            lambda: (
                flashinfer.mla_decode(rotated, MLA_SCALE) if mla else flashinfer.gqa_decode(rotated)
            )
        )
    name = size.kind.replace("_", " ")
    return Case(
        *("attention", name, size.params, rotating(run, rotated), nbytes, flops, others, sets),
        error=lambda: truth.decode_error(
            run(*rotated[0]), rotated[0], MLA_SCALE if mla else D**-0.5, size.window or None
        ),
    )


def _prefill(size: Size, device: torch.device, peers: bool) -> Case:
    B, K, NH = size.batch, size.context, size.heads
    Q, mla = size.queries, size.mla
    KVH, D, DV = (NH, D_MLA + R, D_MLA) if mla else (size.kv_heads, *[size.head_dim] * 2)
    flops, fp8 = 2 * B * NH * size.pairs * (D + DV), size.format == "fp8"
    if fp8:
        a_token = 2 * KVH * (D + 4)
    else:
        a_token = 2 * ((NH * D_MLA + R if mla else KVH * D) + KVH * DV)
    nbytes = B * (2 * Q * NH * (D + DV) + size.keys_read * a_token)
    sets = sets_for(nbytes, device)
    ends = torch.arange(B + 1, dtype=torch.int32, device=device)
    rows = Ragged.cumulative(ends * Q, ends * K, Q)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device=device)

    def inputs() -> tuple[Any, ...]:
        out = random(B * Q, NH, DV)
        if mla:
            q = random(B * Q, NH, D).split([D_MLA, R], -1)
            k, v = random(B * K, NH, 2 * D_MLA).split(D_MLA, -1)
            return (*q, k, random(B * K, R), v, out)
        if size.keys == "rows":
            return (random(B * Q, NH, D), random(B * K, KVH, D), random(B * K, KVH, D), out)
        table, lengths = pages(size, device)
        paged = Ragged(ends[:-1] * Q, rows.q_lengths, lengths, Q, page_table=table)
        (k, k_scale), (v, v_scale) = (cache(table, (KVH, D), size, fp8) for _ in range(2))
        return (random(B * Q, NH, D), k, v, paged, k_scale, v_scale, out)

    def run(*given: Any, plan: Any = None) -> torch.Tensor:
        *tensors, out = given
        options: dict[str, Any] = {"scale": D**-0.5, "out": out, "plan": plan}
        if mla:
            return mla_prefill(*(*tensors, rows), **options)
        options["window"] = size.window or None
        if size.keys == "rows":
            return gqa_prefill(*(*tensors, rows), **options)
        q, k, v, paged, k_scale, v_scale = tensors
        return gqa_prefill(q, k, v, paged, k_scale=k_scale, v_scale=v_scale, **options)

    rotated = [inputs() for _ in range(sets)]
    others: dict[str, Call] = {}
    if peers and size.keys == "rows":
        others = prefill_peers(rotated, B, Q, K, size.window)
        others[flashinfer.NAME] = lazily(
            lambda: flashinfer.prefill(rotated, B, Q, K, size.window, D**-0.5)
        )

    def error() -> float:
        tensors, batch = [*rotated[0][:-1]], rows
        options: dict[str, Any] = {} if mla else {"window": size.window or None}
        if size.keys == "pages":
            *tensors, batch, k_scale, v_scale = tensors
            options |= {"k_scale": k_scale, "v_scale": v_scale}
        return truth.prefill_error(run(*rotated[0]), tensors, batch, D**-0.5, **options)

    name = size.kind.replace("_", " ")
    return Case(
        *("attention", name, size.params, rotating(run, rotated), nbytes, flops, others, sets),
        error=error,
    )
