"""The attention rows of ``ops.py``: decode and prefill, latent and grouped, both kinds of cache."""

from __future__ import annotations

import torch

from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.gqa_prefill import gqa_prefill
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.attention.mla_prefill import mla_prefill
from pykernels.gpu.attention.mla_read import mla_read
from pykernels.shapes import Ragged

from .ops import BF16, FP8, Op, Tensors, empty, large, normal

B, PAGE = 3, 16
KIND = {False: "bf16", True: "E4M3"}


def _cache(
    device: torch.device, name: str, fp8: bool, tokens: int, *token: int, page: int = PAGE
) -> Tensors:
    """Pages, with their scales as "<name>_scale" for E4M3."""
    values = normal(device, B * (tokens // page), page, *token, dtype=FP8 if fp8 else BF16)
    scale = {f"{name}_scale": torch.rand(values.shape[:-1], device=device) + 0.5} if fp8 else {}
    return {name: values, **scale}


def _table(device: torch.device, most: int, page: int = PAGE) -> Tensors:
    """Pages in random order for B sequences of up to ``most`` tokens, and their lengths."""
    pages = most // page
    return {
        "table": torch.randperm(B * pages, device=device).view(B, pages).int(),
        "lengths": torch.randint(1, most + 1, (B,), device=device).int(),
    }


def _mla_decode(heads: int, fp8: bool = False, page: int = PAGE) -> Op:
    """Pages of 64 for Hopper's own kernel for E4M3."""

    def make(device: torch.device) -> Tensors:
        L, R, most = large(device, 512, 64), large(device, 64, 16), large(device, 2048, 128)
        NH = large(device, heads, max(3, heads // 8))
        queries = {"q": normal(device, B, NH, L), "q_rope": normal(device, B, NH, R)}
        return {
            **queries,
            **_cache(device, "latent", fp8, most, L, page=page),
            **_cache(device, "rope", False, most, R, page=page),
            **_table(device, most, page),
            "out": empty(device, B, NH, L),
        }

    def run(t: Tensors) -> torch.Tensor:
        given = (t["q"], t["q_rope"], t["latent"], t["rope"], t["table"], t["lengths"])
        return mla_decode(*given, scale=0.07, latent_scale=t.get("latent_scale"), out=t["out"])

    return Op(f"mla_decode, {heads} heads, {KIND[fp8]}, pages of {page}", make, run)


def _gqa_decode(fp8: bool = False, window: int | None = None, page: int = PAGE) -> Op:
    """Pages of 64 for E4M3 in the lanes that multiply, and for bf16 through a ring."""

    def make(device: torch.device) -> Tensors:
        NH, KVH, D = large(device, 32, 6), large(device, 8, 2), large(device, 128, 32)
        most = large(device, 4096, max(96, 2 * page))
        caches = (_cache(device, name, fp8, most, KVH, D, page=page) for name in "kv")
        given = {"q": normal(device, B, NH, D), "out": empty(device, B, NH, D)}
        return {**given, **next(caches), **next(caches), **_table(device, most, page)}

    def run(t: Tensors) -> torch.Tensor:
        scales = {name: t.get(name) for name in ("k_scale", "v_scale")}
        given = (t["q"], t["k"], t["v"], t["table"], t["lengths"])
        return gqa_decode(*given, scale=0.1, window=window, **scales, out=t["out"])

    within = ", window" if window else ""
    return Op(f"gqa_decode, {KIND[fp8]}{within}, pages of {page}", make, run)


def _where(device: torch.device, most: int) -> Tensors:
    """Queries behind prefixes; each sequence's rows at the end of a place for ``most``."""
    queries = torch.randint(1, most + 1, (B,), device=device)
    keys = (queries + torch.randint(0, most, (B,), device=device)).clamp(max=most)
    ends = torch.arange(1, B + 1, device=device) * most
    found = {"q_starts": ends - queries, "q_lengths": queries}
    found |= {"k_starts": ends - keys, "k_lengths": keys}
    return {name: x.int() for name, x in found.items()}


def _batch(t: Tensors, most: int) -> Ragged:
    names = ("q_starts", "q_lengths", "k_lengths")
    keys = {"page_table": t["table"]} if "table" in t else {"k_starts": t["k_starts"]}
    return Ragged(*(t[name] for name in names), most, **keys)


def _gqa_prefill(
    paged: bool = False,
    fp8: bool = False,
    window: int | None = None,
    wide: int = 128,
    most: int = 512,
) -> Op:
    """Heads ``wide`` and sequences of up to ``most`` tokens on a GPU: the kernel for Hopper takes
    heads of a power of two, and E4M3 only where many queries make it worth unpacking."""

    def make(device: torch.device) -> Tensors:
        NH, KVH, D = large(device, 8, 4), 2, large(device, wide, wide // 4)
        most_tokens = large(device, most, 48)
        given = {
            "q": normal(device, B * most_tokens, NH, D),
            "out": empty(device, B * most_tokens, NH, D),
        }
        given |= _where(device, most_tokens)
        if paged:
            given["table"] = _table(device, most_tokens)["table"]
            for name in "kv":
                given |= _cache(device, name, fp8, most_tokens, KVH, D)
        else:
            given |= {name: normal(device, B * most_tokens, KVH, D) for name in "kv"}
        return given

    def run(t: Tensors) -> torch.Tensor:
        scales = {name: t.get(name) for name in ("k_scale", "v_scale")}
        batch = _batch(t, t["q"].shape[0] // B)
        given = (t["q"], t["k"], t["v"], batch)
        return gqa_prefill(*given, scale=0.1, window=window, **scales, out=t["out"])

    words = ["gqa_prefill", *["pages"] * paged, *["E4M3"] * fp8, *["window"] * bool(window)]
    words += [f"heads of {wide}"] * (wide != 128) + [f"{most} tokens"] * (most != 512)
    return Op(", ".join(words), make, run)


def _mla_prefill() -> Op:
    def make(device: torch.device) -> Tensors:
        NH, D, R = large(device, 8, 3), large(device, 128, 32), large(device, 64, 16)
        rows = B * large(device, 512, 48)
        return {
            "q": normal(device, rows, NH, D),
            "q_rope": normal(device, rows, NH, R),
            "kv": normal(device, rows, NH, 2 * D),
            "k_rope": normal(device, rows, R),
            "out": empty(device, rows, NH, D),
            **_where(device, rows // B),
        }

    def run(t: Tensors) -> torch.Tensor:
        k, v = t["kv"].split(t["q"].shape[-1], -1)
        batch = _batch(t, t["q"].shape[0] // B)
        given = (t["q"], t["q_rope"], k, t["k_rope"], v, batch)
        return mla_prefill(*given, scale=0.07, out=t["out"])

    return Op("mla_prefill", make, run)


def _mla_read(fp8: bool) -> Op:
    def make(device: torch.device) -> Tensors:
        L, R, most = large(device, 512, 40), large(device, 64, 16), large(device, 2048, 48)
        return {
            **_cache(device, "latent", fp8, most, L),
            **_cache(device, "rope", False, most, R),
            **_table(device, most),
            "starts": torch.arange(B, device=device).int() * most,
            "out": empty(device, B * most, L),
            "rope_out": empty(device, B * most, R),
        }

    def run(t: Tensors) -> None:
        where = (t["table"], t["starts"], t["lengths"], len(t["out"]))
        results = (t["out"], t["rope_out"])
        mla_read(t["latent"], t["rope"], *where, t.get("latent_scale"), results)

    return Op(f"mla_read, {KIND[fp8]}", make, run, ("out", "rope_out"))


ATTENTION = (
    _mla_decode(128),
    _mla_decode(16),
    _mla_decode(128, fp8=True),
    _mla_decode(16, fp8=True),
    _mla_decode(128, fp8=True, page=64),
    _mla_prefill(),
    _gqa_prefill(),
    _gqa_decode(),
    _gqa_decode(window=50),
    _gqa_decode(fp8=True, page=64),
    _gqa_decode(page=64),
    _gqa_decode(window=50, page=64),
    _gqa_prefill(window=20),
    _gqa_prefill(paged=True),
    _gqa_prefill(paged=True, fp8=True),
    _gqa_prefill(wide=96),
    _gqa_prefill(paged=True, window=20, wide=96),
    _gqa_prefill(paged=True, fp8=True, most=96),
    _mla_read(fp8=False),
    _mla_read(fp8=True),
)
