"""Rows of the table of GPU ops (see ``ops.py``): what a step of a model has around its products."""

from __future__ import annotations

import torch

from pykernels.gpu.collectives.one_shot import OneShotMemory, one_shot_all_reduce
from pykernels.gpu.copy_bytes import copy_bytes
from pykernels.gpu.handshake import combine, copy_rows
from pykernels.gpu.norm import post_norm, softcap
from pykernels.gpu.per_head_linear import per_head_linear
from pykernels.gpu.rope import rope_table
from pykernels.gpu.rope_cache_write.gqa import gqa_rope_cache_write
from pykernels.gpu.rope_cache_write.mla import mla_rope_cache_write
from pykernels.gpu.sampling import count_tokens, sample
from pykernels.ref.sampling import MAX_LOGPROBS, Sampled
from pykernels.ref.sampling.inputs import SamplingInputs

from .ops import BF16, FP32, Op, Tensors, empty, integers, large, normal
from .ops_kv_pages import KV_PAGES

INT32, INT64 = torch.int32, torch.int64
_SEEN = ("repetition", "presence", "frequency", "seen", "seen_row")


def _sample(name: str, *optional: str) -> Op:
    """``optional``: of the inputs."""

    def make(device: torch.device) -> Tensors:
        R, V = large(device, 6, 3), large(device, 129_280, 2500)
        made = {
            "logits": normal(device, R, V, dtype=FP32) * 3,
            "temperature": torch.rand(R, device=device).round(decimals=1),  # some 0: greedy
            "top_k": integers(device, 90, R, dtype=INT32),
            "top_p": torch.rand(R, device=device),
            "min_p": torch.rand(R, device=device) / 9,
            "seed": integers(device, 1 << 40, R, dtype=INT64),
            "draws": integers(device, 1 << 40, R, dtype=INT64),
            "logprobs": integers(device, 9, R, dtype=INT32) - 1,
            "tokens": empty(device, R, dtype=INT64),
            "own": empty(device, R, dtype=FP32),
            "top_ids": empty(device, R, MAX_LOGPROBS, dtype=INT64),
            "top_logprobs": empty(device, R, MAX_LOGPROBS, dtype=FP32),
        }
        if "seen" in optional:
            made |= {part: torch.rand(R, device=device) + 0.5 for part in _SEEN[:3]}
            made["seen"] = integers(device, 4, 2, V, dtype=INT32)
            made["seen_row"] = integers(device, 3, R, dtype=INT32) - 1
        if "bias_ids" in optional:
            ids = torch.randperm(V, device=device)[: 5 * R].to(INT32)
            made |= {"bias_ids": ids, "bias": normal(device, 5 * R, dtype=FP32)}
            made["bias_start"] = torch.arange(0, 5 * R, 5, dtype=INT32, device=device)
            made["bias_count"] = integers(device, 6, R, dtype=INT32)
        if "mask" in optional:
            made["mask"] = integers(device, 1 << 31, 2, -(-V // 32), dtype=INT32)
            made["mask_row"] = integers(device, 3, R, dtype=INT32) - 1
        return made

    def run(t: Tensors) -> None:
        inputs = {k: v for k, v in t.items() if k in SamplingInputs.__dataclass_fields__}
        out = Sampled(t["tokens"], t["own"], t["top_ids"], t["top_logprobs"])
        sample(t["logits"], SamplingInputs(**inputs), out)

    return Op(name, make, run, ("tokens", "own", "top_ids", "top_logprobs"))


def _count_tokens() -> Op:
    def make(device: torch.device) -> Tensors:
        rows = torch.randperm(5, device=device)[:4].to(INT32) - 1
        tokens = integers(device, 40, 4, dtype=INT64) - 1
        return {"tokens": tokens, "rows": rows, "seen": integers(device, 9, 4, 39, dtype=INT32)}

    def run(t: Tensors) -> None:
        count_tokens(t["tokens"], t["rows"], t["seen"])

    return Op("count_tokens", make, run, ("seen",))


def slots_of(device: torch.device, T: int, places: int) -> torch.Tensor:
    slots = torch.randperm(places, device=device)[:T].to(INT32)
    return slots.masked_fill(slots % 3 == 0, -1)


def _gqa_write(name: str, eight: bool, row: bool) -> Op:
    T, NH, KVH, D, R = 5, 6, 2, 96, 64

    def make(device: torch.device) -> Tensors:
        kind = torch.uint8 if eight else BF16
        made = {name: empty(device, 3, 16, KVH, D, dtype=kind) for name in "kv"}
        if eight:
            made |= {f"{x}_scale": empty(device, 3, 16, KVH, dtype=FP32) for x in "kv"}
        return made | {
            "qkv": normal(device, T, (NH + 2 * KVH) * D),
            "angles": normal(device, T, 2, R // 2, dtype=FP32),
            "slot_mapping": slots_of(device, T, 48),
            "q_norm": normal(device, NH * D if row else D),
            "k_norm": normal(device, KVH * D if row else D, dtype=FP32),
            "out": empty(device, T, NH, D),
        }

    def run(t: Tensors) -> None:
        gqa_rope_cache_write(**t, interleaved=row)

    caches = ("k", "v", "k_scale", "v_scale") if eight else ("k", "v")
    return Op(name, make, run, ("out", *caches))


def _mla_write(name: str, eight: bool) -> Op:
    T, NH, L, R = 5, 6, 512, 64

    def make(device: torch.device) -> Tensors:
        made = {
            "q": normal(device, T, NH, R),
            "kv": normal(device, T, L + R),
            "angles": normal(device, T, 2, R // 2, dtype=FP32),
            "slot_mapping": slots_of(device, T, 48),
            "latent": empty(device, 3, 16, L, dtype=torch.uint8 if eight else BF16),
            "rope": empty(device, 3, 16, R),
            "kv_norm": normal(device, L),
            "out": empty(device, T, NH, R),
        }
        return made | ({"latent_scale": empty(device, 3, 16, dtype=FP32)} if eight else {})

    def run(t: Tensors) -> None:
        mla_rope_cache_write(**t, interleaved=eight)

    return Op(name, make, run, ("out", "latent", "rope", *["latent_scale"] * eight))


def _copy_rows() -> Op:
    """To the GPU's own memory; tests of the handshake have pinned memory."""

    def make(device: torch.device) -> Tensors:
        return {
            "x": normal(device, 3, 1000),
            "ids": integers(device, 60, 3, 6, dtype=INT64) - 1,
            "weights": torch.rand(3, 6, device=device),
            "to_x": empty(device, 3, 1000),
            "to_ids": empty(device, 3, 6, dtype=INT32),
            "to_weights": empty(device, 3, 6, dtype=FP32),
        }

    def run(t: Tensors) -> None:
        names = "x", "ids", "weights"
        copy_rows([t[name] for name in names], [t[f"to_{name}"] for name in names])

    return Op("copy_rows", make, run, ("to_x", "to_ids", "to_weights"))


def _copy_bytes() -> Op:
    def make(device: torch.device) -> Tensors:
        return {
            "x": normal(device, 2, 3, 500),
            "ids": integers(device, 60, 6, dtype=INT32),
            "to_x": empty(device, 2, 3, 500),
            "to_ids": empty(device, 6, dtype=INT32),
        }

    def run(t: Tensors) -> None:
        copy_bytes([t["x"], t["ids"]], [t["to_x"], t["to_ids"]])

    return Op("copy_bytes", make, run, ("to_x", "to_ids"))


def _one_shot() -> Op:
    """Of two members on one GPU, where launches cannot wait for each other: its halves apart."""

    def make(device: torch.device) -> Tensors:
        return {
            "x": normal(device, 2, 1500),
            "stop": torch.zeros(1, dtype=INT32, device=device),
            "out": empty(device, 2, 1500),
        }

    def run(t: Tensors) -> None:
        members = [OneShotMemory.on(t["x"].device) for _ in range(2)]
        for half in ("send", "add"):
            for rank in range(2):
                how = {"send": half == "send", "add": half == "add"}
                one_shot_all_reduce(t["x"], members, rank, t["stop"], t["out"], **how)

    return Op("one_shot_all_reduce", make, run, ("out",))


def _combine() -> Op:
    def make(device: torch.device) -> Tensors:
        T, H = 3, large(device, 7168, 1000)
        made = {name: normal(device, T, H, dtype=FP32) for name in ("residual", "a", "b")}
        made |= {"shared": normal(device, T, H), "weight": normal(device, H)}
        return made | {"out": empty(device, T, H), "total": empty(device, T, H, dtype=FP32)}

    def run(t: Tensors) -> None:
        addends, out = [t[name] for name in ("shared", "a", "b")], (t["out"], t["total"])
        combine(t["residual"], addends, t["weight"], 1e-6, out)

    return Op("combine", make, run, ("out", "total"))


def _post_norm() -> Op:
    def make(device: torch.device) -> Tensors:
        T, H = 3, large(device, 7168, 1000)
        made = {"x": normal(device, T, H), "residual": normal(device, T, H, dtype=FP32)}
        made |= {"weight": normal(device, H), "scale": normal(device, 1, dtype=FP32)}
        return made | {"out": empty(device, T, H, dtype=FP32)}

    return Op("post_norm", make, lambda t: post_norm(**t, eps=1e-6))


def _softcap() -> Op:
    def make(device: torch.device) -> Tensors:
        return {"x": normal(device, 3, 2500, dtype=FP32), "out": empty(device, 3, 2500, dtype=FP32)}

    return Op("softcap", make, lambda t: softcap(**t, cap=2.0))


def _per_head(T: int) -> Op:
    def make(device: torch.device) -> Tensors:
        G, K, N = large(device, 128, 2), large(device, 512, 80), large(device, 128, 40)
        weight, out = normal(device, G, N, K), empty(device, T, G, N)
        return {"x": normal(device, T, G, K), "weight": weight, "out": out}

    return Op(
        f"per_head_linear {T} tokens",
        make,
        lambda t: per_head_linear(t["x"], t["weight"], t["out"]),
    )


def _rope_table() -> Op:
    def make(device: torch.device) -> Tensors:
        positions, out = integers(device, 99, 5, dtype=INT64), empty(device, 5, 2, 24, dtype=FP32)
        return {"positions": positions, "f": torch.rand(24, device=device), "out": out}

    return Op("rope_table", make, lambda t: rope_table(t["positions"], t["f"], 1.5, t["out"]))


STEP = (
    _sample("sample"),
    _sample("sample, all inputs", "seen", "bias_ids", "mask"),
    _count_tokens(),
    _gqa_write("gqa_rope_cache_write", False, False),
    _gqa_write("gqa_rope_cache_write, E4M3", True, True),
    _mla_write("mla_rope_cache_write", False),
    _mla_write("mla_rope_cache_write, E4M3", True),
    *KV_PAGES,
    _copy_rows(),
    _copy_bytes(),
    _one_shot(),
    _combine(),
    _post_norm(),
    _softcap(),
    _per_head(2),
    _per_head(300),
    _rope_table(),
)
