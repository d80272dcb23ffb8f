"""Causal prefill against float64, no worse than torch in bf16: prefixes, windows, ragged."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.gpu.attention.gqa_prefill import gqa_prefill
from pykernels.gpu.attention.mla_prefill import mla_prefill
from pykernels.gpu.plans.attention import PrefillPlan
from pykernels.shapes import Ragged

from ..caches import BF16, FP8, make_cache, no_worse
from .inputs import meta, random_sinks

SMALL = PrefillPlan(rows=16, keys=16, num_warps=4, num_stages=1)
WIDE = PrefillPlan(rows=64, keys=32, num_warps=4, num_stages=2)
UNPACK = PrefillPlan(rows=16, keys=16, num_warps=4, num_stages=1, unpack=True)


def warp_specialized(keys: int) -> PrefillPlan:
    return PrefillPlan(128, keys, 8, 1, warp_specialized=True)


def ragged(
    queries: list[int], keys: list[int], device: torch.device, gap: int = 0, **paged: Any
) -> tuple[Ragged, int, int]:
    """Sequences behind each other with ``gap`` rows of padding before each; (batch, TQ, TK)."""

    def starts(lengths: list[int]) -> tuple[list[int], int]:
        ends = list(accumulate(gap + length for length in lengths))
        return [end - length for end, length in zip(ends, lengths, strict=True)], ends[-1]

    (q_starts, TQ), (k_starts, TK) = starts(queries), starts(keys)
    columns = (torch.tensor(x, dtype=torch.int32) for x in (q_starts, queries, keys, k_starts))
    q_at, q_n, k_n, k_at = (x.to(device) for x in columns)
    where = paged or {"k_starts": k_at}
    return Ragged(q_at, q_n, k_n, max(queries), **where), TQ, TK


def poison_padding(x: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """NaN in the rows of no sequence."""
    kept = torch.zeros(x.shape[0], dtype=torch.bool)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        kept[start : start + length] = True
    return x.masked_fill(~kept.view(-1, *[1] * (x.ndim - 1)).to(x.device), float("nan"))


def rows_of(batch: Ragged, x: torch.Tensor) -> torch.Tensor:
    """The rows of the sequences, one behind the other."""
    spans = zip(batch.q_starts.tolist(), batch.q_lengths.tolist(), strict=True)
    return torch.cat([x[start : start + length] for start, length in spans])


def run_gqa(
    device: torch.device,
    queries: list[int],
    keys: list[int],
    *,
    NH: int = 4,
    KVH: int = 2,
    D: int = 32,
    page: int = 0,
    fp8: bool = False,
    gap: int = 0,
    plan: PrefillPlan | None = None,
    loud: tuple[int, ...] = (),
    sinks: bool = False,
    **options: Any,
) -> None:
    """``loud``: keys of each sequence whose values a row of many keys could not hide."""
    if page:
        cache = make_cache(keys, page, [(KVH, D)] * 2, device, fp8=(fp8, fp8))
        batch, TQ, _ = ragged(queries, keys, device, gap, page_table=cache.table)
        k, v = cache.values
        options |= {"k_scale": cache.scales[0], "v_scale": cache.scales[1]}
    else:
        batch, TQ, TK = ragged(queries, keys, device, gap)
        assert batch.k_starts is not None
        k, v = (
            poison_padding(torch.randn(TK, KVH, D).to(BF16), batch.k_starts, batch.k_lengths)
            for _ in range(2)
        )
        v[(batch.k_starts.cpu()[:, None] + torch.tensor(loud)).long().flatten()] *= 64
        k, v = k.to(device), v.to(device)
    q = poison_padding(torch.randn(TQ, NH, D).to(BF16), batch.q_starts, batch.q_lengths).to(device)
    options["scale"] = D**-0.5
    options["sinks"] = random_sinks(NH, BF16, device) if sinks else None
    exact = ref.gqa_prefill(q, k, v, batch, **options, dtype=torch.float64)
    native = ref.gqa_prefill(q, k, v, batch, **options, dtype=BF16)
    out = torch.full_like(q, 7.0)
    gqa_prefill(q, k, v, batch, **options, out=out, plan=plan)
    no_worse(*(rows_of(batch, x) for x in (out, exact, native)))
    assert (out == 7).all(-1).all(-1).sum() == TQ - sum(queries)  # padding is left alone


GQA = [
    ({"queries": [20, 1, 0, 30], "keys": [20, 40, 9, 35]}, SMALL, "ragged, one without queries"),
    ({"queries": [20, 30], "keys": [20, 30], "gap": 7}, SMALL, "left-padded, the padding is NaN"),
    ({"queries": [40], "keys": [50], "NH": 3, "KVH": 1}, SMALL, "three heads on one"),
    ({"queries": [40], "keys": [50], "D": 80}, SMALL, "heads that are no power of two"),
    ({"queries": [60], "keys": [75], "window": 20}, SMALL, "a window across blocks"),
    ({"queries": [20], "keys": [20], "window": 500}, SMALL, "a window wider than the sequence"),
    ({"queries": [30], "keys": [40], "softcap": 2.0}, SMALL, "capped scores"),
    ({"queries": [25, 9], "keys": [60, 9], "page": 16}, SMALL, "keys in pages"),
    ({"queries": [25], "keys": [60], "page": 4, "window": 9}, SMALL, "pages smaller than a block"),
    ({"queries": [25, 9], "keys": [60, 30], "page": 16, "fp8": True}, SMALL, "keys in E4M3"),
    (
        {"queries": [25, 0, 9], "keys": [60, 9, 33], "page": 4, "fp8": True, "D": 48},
        UNPACK,
        "keys in E4M3, unpacked first",
    ),
    ({"queries": [70], "keys": [100]}, WIDE, "blocks of queries larger than those of keys"),
    ({"queries": [70], "keys": [100], "window": 30}, WIDE, "a window inside such a block"),
    ({"queries": [9], "keys": [4]}, SMALL, "the first queries have no key at all"),
    ({"queries": [32], "keys": [33]}, SMALL, "the last row's own key is a block's first"),
    ({"queries": [32], "keys": [33], "window": 32}, SMALL, "a window leaves out a block's first"),
    ({"queries": [5], "keys": [39], "window": 20}, SMALL, "a window takes in a block's last"),
    ({"queries": [40, 9], "keys": [50, 4], "sinks": True}, SMALL, "sinks; queries without a key"),
    (
        {"queries": [25], "keys": [60], "page": 16, "fp8": True, "sinks": True, "window": 20},
        SMALL,
        "sinks, keys in E4M3, a window",
    ),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), GQA, ids=[row[2] for row in GQA])
def test_gqa_prefill(sizes: dict[str, Any], plan: PrefillPlan, why: str, device) -> None:
    run_gqa(device, plan=plan, **sizes)


def run_mla(
    device: torch.device,
    queries: list[int],
    keys: list[int],
    *,
    NH: int = 3,
    D: int = 32,
    R: int = 16,
    gap: int = 0,
    plan: PrefillPlan | None = None,
) -> None:
    batch, TQ, TK = ragged(queries, keys, device, gap)
    both = torch.randn(TK, NH, 2 * D).to(BF16).to(device)  # keys and values of one projection
    k, v = both.split(D, -1)
    k_rope = torch.randn(TK, R).to(BF16).to(device)
    q, q_rope = torch.randn(TQ, NH, D + R).to(BF16).to(device).split([D, R], -1)
    inputs = (q, q_rope, k, k_rope, v, batch)
    exact = ref.mla_prefill(*inputs, scale=(D + R) ** -0.5, dtype=torch.float64)
    native = ref.mla_prefill(*inputs, scale=(D + R) ** -0.5, dtype=BF16)
    out = torch.full_like(exact, float("nan"), dtype=BF16)
    mla_prefill(*inputs, scale=(D + R) ** -0.5, out=out, plan=plan)
    no_worse(*(rows_of(batch, x) for x in (out, exact, native)))


MLA = [
    ({"queries": [33], "keys": [33]}, SMALL, "no prefix, a ragged last block"),
    ({"queries": [5, 20], "keys": [60, 20]}, SMALL, "ragged, one behind a prefix"),
    ({"queries": [20, 30], "keys": [20, 40], "gap": 5}, SMALL, "left-padded"),
    ({"queries": [70], "keys": [90]}, WIDE, "wide blocks"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), MLA, ids=[row[2] for row in MLA])
def test_mla_prefill(sizes: dict[str, Any], plan: PrefillPlan, why: str, device) -> None:
    run_mla(device, plan=plan, **sizes)


def test_cumulative_lengths_as_varlen_attention_has_them() -> None:
    ends = torch.tensor([0, 3, 3, 10])
    batch = Ragged.cumulative(ends, ends + torch.tensor([0, 1, 1, 5]), max_queries=7)
    assert batch.q_starts.tolist() == [0, 3, 3]
    assert batch.q_lengths.tolist() == [3, 0, 7]
    assert batch.k_lengths.tolist() == [4, 0, 11]


def _compile_gqa(D: int, page: int = 0, fp8: bool = False, **options: Any) -> None:
    n, table = meta(2, dtype=torch.int32), meta(2, 9, dtype=torch.int32)
    batch = Ragged(n, n, n, 300, **({"page_table": table} if page else {"k_starts": n}))
    k = meta(*((9, page, 8, D) if page else (500, 8, D)), dtype=FP8 if fp8 else BF16)
    scale = meta(*k.shape[:-1], dtype=torch.float32) if fp8 else None
    options |= {"scale": 0.1, "k_scale": scale, "v_scale": scale}
    gqa_prefill(meta(300, 32, D), k, k, batch, **options)


def _compile_mla(D: int, DV: int, R: int) -> None:
    n = meta(2, dtype=torch.int32)
    batch = Ragged(n, n, n, 300, k_starts=n)
    k, v = meta(500, 16, D + DV).split([D, DV], -1)
    q, q_rope = meta(300, 16, D + R).split([D, R], -1)
    mla_prefill(q, q_rope, k, meta(500, R), v, batch, scale=0.1)


COMPILES = [
    ("GQA, pages", lambda: _compile_gqa(128, page=64)),
    ("GQA, D 96, E4M3 unpacked to rows", lambda: _compile_gqa(96, page=64, fp8=True)),
    ("GQA, D 64, sinks", lambda: _compile_gqa(64, page=64, window=99, sinks=meta(32))),
    ("GQA, D 64, small pages, sinks", lambda: _compile_gqa(64, page=4, sinks=meta(32))),
]
COMPILES_ON_A_GPU = [
    ("GQA, D 128", lambda: _compile_gqa(128)),
    ("GQA, D 64, window", lambda: _compile_gqa(64, window=99)),
    ("GQA, D 256", lambda: _compile_gqa(256)),
    ("GQA, D 512", lambda: _compile_gqa(512, page=64)),
    ("GQA, D 512, E4M3", lambda: _compile_gqa(512, page=64, fp8=True)),
    ("GQA, pages, E4M3", lambda: _compile_gqa(128, page=64, fp8=True)),
    ("MLA", lambda: _compile_mla(128, 128, 64)),
    ("MLA, the widest", lambda: _compile_mla(256, 256, 64)),
    ("MLA, GLM's", lambda: _compile_mla(192, 256, 64)),
    ("GQA, Triton's for Hopper", lambda: _compile_gqa(128, plan=PrefillPlan(128, 128, 8, 2))),
    ("GQA, small pages", lambda: _compile_gqa(128, page=16)),
]


# --- on a GPU: full sizes and the shipped plans

FULL = [
    ({"queries": [2048], "keys": [2048], "NH": 8, "KVH": 2, "D": 128}, "heads of 128"),
    ({"queries": [1000, 77, 0, 300], "keys": [1500, 77, 9, 4000], "D": 128}, "ragged, prefixes"),
    ({"queries": [700], "keys": [900], "D": 96}, "heads of 96"),
    ({"queries": [700], "keys": [900], "D": 256, "softcap": 30.0}, "heads of 256, capped"),
    ({"queries": [700, 50], "keys": [900, 50], "D": 512, "page": 64}, "heads of 512"),
    ({"queries": [1500], "keys": [1900], "D": 128, "window": 300}, "a window"),
    ({"queries": [700, 50], "keys": [900, 50], "D": 128, "page": 64}, "pages"),
    ({"queries": [700, 50], "keys": [900, 50], "D": 128, "page": 64, "fp8": True}, "E4M3"),
    ({"queries": [9, 50], "keys": [900, 50], "D": 128, "page": 4, "fp8": True}, "few, E4M3"),
    ({"queries": [700, 50], "keys": [900, 50], "D": 96, "page": 4, "fp8": True}, "96, E4M3"),
    ({"queries": [300, 400], "keys": [300, 400], "D": 128, "gap": 100}, "left-padded"),
    ({"queries": [256, 9], "keys": [257, 319], "D": 96, "window": 256, "loud": (0, 63)}, "edges"),
    ({"queries": [700, 50], "keys": [900, 50], "D": 96, "sinks": True}, "heads of 96, sinks"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "why"), FULL, ids=[row[1] for row in FULL])
def test_gqa_prefill_full(sizes: dict[str, Any], why: str, device) -> None:
    run_gqa(device, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [None, PrefillPlan(128, 64, 8, 2)], ids=["shipped", "Triton's"])
def test_both_prefills_full(plan: PrefillPlan | None, device) -> None:
    """Whichever plan is shipped, Triton's kernel works too."""
    run_gqa(device, [700, 50], [900, 50], D=128, plan=plan)
    run_gqa(device, [700, 50], [900, 50], D=256, plan=plan)
    run_mla(device, [2048], [2048], NH=8, D=128, R=64, plan=plan)
    run_mla(device, [1000, 77, 300], [1500, 77, 4000], D=128, R=64, gap=50, plan=plan)


@pytest.mark.gpu
def test_prefill_has_no_race(device) -> None:
    """The same bits again and again: buffers are refilled while others are read."""
    batch, TQ, TK = ragged([3000, 300], [3000, 1200], device)
    q, k, v = (torch.randn(T, 8, 128).to(BF16).to(device) for T in (TQ, TK, TK))
    once = gqa_prefill(q, k, v, batch, scale=0.09)
    assert all(torch.equal(once, gqa_prefill(q, k, v, batch, scale=0.09)) for _ in range(50))
