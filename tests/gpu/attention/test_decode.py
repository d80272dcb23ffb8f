"""MLA and GQA decode against float64, no worse than torch in bf16: Triton's kernels, and on a GPU
whichever the shipped plans choose, at full size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.gpu.attention.gqa_decode import gqa_decode
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.common import launch
from pykernels.gpu.plans.attention import DecodePlan

from ..caches import BF16, FP8
from .inputs import check, gqa_inputs, meta, mla_inputs

F32 = torch.float32
SMALL = DecodePlan(rows=16, keys=16, num_warps=4, num_stages=1)
SCORES = replace(SMALL, split_scores=True)


def split(ctas_per_sm: int) -> DecodePlan:
    return replace(SMALL, ctas_per_sm=ctas_per_sm)


MLA = [
    ({"lengths": [33]}, SMALL, "one sequence, a ragged last block"),
    ({"lengths": [100, 0, 1, 48]}, SMALL, "ragged: an empty sequence, one key, whole blocks"),
    ({"lengths": [70, 3], "NH": 20}, SMALL, "heads that do not fill the last tile"),
    ({"lengths": [70, 3], "NH": 5, "S": 3}, SMALL, "several new tokens, each behind the last"),
    ({"lengths": [2], "NH": 4, "S": 3}, SMALL, "the first token has no key at all"),
    ({"lengths": [90, 17], "fp8": True}, SMALL, "E4M3 latents beside bf16 rope"),
    ({"lengths": [40], "softcap": 2.0}, SMALL, "capped scores"),
    ({"lengths": [90], "page": 4}, SMALL, "pages smaller than a block"),
    ({"lengths": [90, 33]}, SCORES, "the products as Hopper's plan orders them"),
    ({"lengths": [90], "fp8": True}, SCORES, "the same with E4M3"),
    ({"lengths": [90]}, split(0), "one split a sequence: no combining"),
    ({"lengths": [90]}, split(9), "more splits than blocks"),
    ({"lengths": [150, 3, 0, 17]}, split(4), "a long sequence beside short ones"),
    ({"lengths": [75, 20]}, replace(SMALL, rows=64, keys=32), "a wide tile"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), MLA, ids=[row[2] for row in MLA])
def test_mla_decode(sizes: dict[str, Any], plan: DecodePlan, why: str, device) -> None:
    check(mla_decode, ref.mla_decode, mla_inputs(device=device, **sizes), plan=plan)


GQA = [
    ({"lengths": [33]}, SMALL, "one sequence, a ragged last block"),
    ({"lengths": [100, 0, 1, 48]}, SMALL, "ragged: an empty sequence, one key, whole blocks"),
    ({"lengths": [50], "NH": 3, "KVH": 3}, SMALL, "a query head a KV head"),
    ({"lengths": [50], "NH": 40, "KVH": 2}, SMALL, "more query heads of a KV head than a tile"),
    ({"lengths": [50], "D": 80}, SMALL, "heads that are no power of two"),
    ({"lengths": [50, 9], "S": 3}, SMALL, "several new tokens, each behind the last"),
    ({"lengths": [90, 10], "window": 20}, SMALL, "a window across a block's edge"),
    ({"lengths": [90, 10], "window": 20, "S": 3}, SMALL, "each new token has its own window"),
    ({"lengths": [67, 68, 51, 36], "window": 20}, SMALL, "windows from a block's last key, first"),
    ({"lengths": [69, 70], "window": 20, "S": 3}, SMALL, "the first token's window is the widest"),
    ({"lengths": [40], "softcap": 2.0}, SMALL, "capped scores"),
    ({"lengths": [90, 17], "fp8": True}, SMALL, "E4M3 with a scale a token and head"),
    ({"lengths": [90], "page": 4, "window": 33}, SMALL, "pages smaller than a block"),
    ({"lengths": [90]}, split(0), "one split a sequence: no combining"),
    ({"lengths": [90, 5]}, split(9), "more splits than blocks"),
    ({"lengths": [250, 3, 90], "window": 100}, split(4), "splits by what the window leaves"),
    ({"lengths": [75, 20]}, replace(SMALL, rows=64, keys=32), "a wide tile"),
    ({"lengths": [1] * 33 + [100], "NH": 2, "KVH": 1}, split(9), "a long one beside 33"),
    ({"lengths": [90, 0, 2], "S": 3, "sinks": F32}, split(0), "sinks; tokens without keys"),
    ({"lengths": [190, 0, 2], "S": 3, "sinks": BF16, "window": 60}, split(9), "sinks, splits"),
    ({"lengths": [90, 17], "fp8": True, "sinks": BF16}, split(0), "sinks, E4M3"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), GQA, ids=[row[2] for row in GQA])
def test_gqa_decode(sizes: dict[str, Any], plan: DecodePlan, why: str, device) -> None:
    check(gqa_decode, ref.gqa_decode, gqa_inputs(device=device, **sizes), plan=plan)


def test_a_query_without_keys_is_zero(device) -> None:
    inputs, options = mla_inputs([0, 20], device)
    assert mla_decode(*inputs, **options)[0].count_nonzero() == 0
    inputs, options = gqa_inputs([2], device, S=3)
    assert gqa_decode(*inputs, **options)[0, 0].count_nonzero() == 0
    none = (inputs[0][:0], *inputs[1:3], inputs[3][:0], inputs[4][:0])
    assert gqa_decode(*none, **options).shape == (0, *inputs[0].shape[1:])


def test_huge_scores_do_not_overflow(device) -> None:
    inputs, options = gqa_inputs([60], device)
    check(gqa_decode, ref.gqa_decode, ((inputs[0] * 300, *inputs[1:]), options), plan=SMALL)


@pytest.mark.parametrize("ctas_per_sm", [0, 9])
def test_sinks_far_from_all_scores(ctas_per_sm: int, device) -> None:
    """Of what they take nothing is left, or nothing is missing."""
    inputs, options = gqa_inputs([60], device)
    sinks = torch.tensor([1e4, -1e4] * 4, device=device)
    without = gqa_decode(*inputs, **options, plan=split(ctas_per_sm))
    out = gqa_decode(*inputs, **options, sinks=sinks, plan=split(ctas_per_sm))
    assert out[:, ::2].count_nonzero() == 0
    assert torch.equal(out[:, 1::2], without[:, 1::2])


def test_rows_of_zeros_may_have_a_scale_of_zero(device) -> None:
    """A quantizer that does not guard itself makes such: they are values like others."""
    inputs, options = gqa_inputs([40, 9], device, fp8=True)
    page = int(inputs[3][0, 0])
    for x in (*inputs[1:3], options["k_scale"], options["v_scale"]):
        x.view(torch.uint8)[page, :5] = 0
    check(gqa_decode, ref.gqa_decode, (inputs, options), plan=SMALL)
    inputs, options = mla_inputs([40, 9], device, fp8=True)
    page = int(inputs[4][0, 0])
    inputs[2].view(torch.uint8)[page, :5] = 0
    options["latent_scale"][page, :5] = 0
    check(mla_decode, ref.mla_decode, (inputs, options), plan=SMALL)


def test_queries_need_not_be_contiguous(device) -> None:
    """MLA's absorbed projection is a batched product over heads, [NH, B, L]; GQA's queries may be
    part of a wider projection."""
    inputs, options = mla_inputs([20, 3], device)
    turned = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:2])
    assert not turned[0].is_contiguous()
    expected = mla_decode(*inputs, **options)
    assert torch.equal(mla_decode(*turned, *inputs[2:], **options), expected)
    inputs, options = gqa_inputs([20, 3], device, S=2)
    q = torch.randn(2, 3, 16, 48, device=device).to(BF16)[:, :2, :8, :32]
    dense = gqa_decode(q.contiguous(), *inputs[1:], **options)
    assert torch.equal(gqa_decode(q, *inputs[1:], **options), dense)


def _compile_mla(NH: int, fp8: bool = False, page: int = 64) -> None:
    kind, scale = (FP8, meta(9, page, dtype=torch.float32)) if fp8 else (BF16, None)
    where = (meta(2, 99, dtype=torch.int32), meta(2, dtype=torch.int32))
    given = (meta(2, NH, 512), meta(2, NH, 64), meta(9, page, 512, dtype=kind), meta(9, page, 64))
    mla_decode(*given, *where, scale=0.1, latent_scale=scale)


def _compile_gqa(NH: int, D: int, fp8: bool = False, **options: Any) -> None:
    kind, scale = (FP8, meta(9, 64, 8, dtype=torch.float32)) if fp8 else (BF16, None)
    where = (meta(2, 99, dtype=torch.int32), meta(2, dtype=torch.int32))
    options |= {"scale": 0.1, "k_scale": scale, "v_scale": scale}
    gqa_decode(meta(2, NH, D), *[meta(9, 64, 8, D, dtype=kind)] * 2, *where, **options)


_BOTH = {"window": 99, "softcap": 9.0}


def _compile_sinks(D: int, fp8: bool = False, **plan: Any) -> None:
    """``plan``: of a kernel that does not split, and so has the sinks itself; one that is written
    out for a GPU is compiled for that GPU alone."""
    capability = launch.arch(torch.device("meta"))
    hopper, native_e4m3 = capability[0] == 9, capability >= (8, 9)
    if not hopper and "ring_buffer" in plan or not native_e4m3 and "fp8_mma" in plan:
        return
    options = {"plan": DecodePlan(num_warps=4, ctas_per_sm=0, **plan)} if plan else {}
    _compile_gqa(32, D, fp8, sinks=meta(32), **options)


COMPILES = [
    ("MLA, 128 heads", lambda: _compile_mla(128)),
    ("MLA, 16 heads, E4M3, small pages", lambda: _compile_mla(16, fp8=True, page=16)),
    ("GQA, D 128", lambda: _compile_gqa(32, 128)),
    ("GQA, D 128, E4M3", lambda: _compile_gqa(32, 128, fp8=True)),
    ("GQA, D 96, E4M3", lambda: _compile_gqa(32, 96, fp8=True)),
    ("GQA, sinks, splits", lambda: _compile_sinks(64)),
    ("GQA, sinks", lambda: _compile_sinks(64, rows=16, keys=64, num_stages=2)),
    ("GQA, D 128, sinks, splits", lambda: _compile_sinks(128)),
    (
        "GQA, D 128, sinks",
        lambda: _compile_sinks(128, rows=16, keys=64, num_stages=6, ring_buffer=True),
    ),
    (
        "GQA, D 128, E4M3, sinks",
        lambda: _compile_sinks(128, fp8=True, rows=8, keys=128, num_stages=1, fp8_mma=True),
    ),
]
COMPILES_ON_A_GPU = [
    ("MLA, 16 heads", lambda: _compile_mla(16)),
    ("MLA, 128 heads, E4M3", lambda: _compile_mla(128, fp8=True)),
    ("GQA, D 128, E4M3, 16 rows, window, cap", lambda: _compile_gqa(128, 128, True, **_BOTH)),
    ("GQA, D 256, window, cap", lambda: _compile_gqa(16, 256, **_BOTH)),
    ("GQA, D 512", lambda: _compile_gqa(64, 512)),
    ("GQA, D 512, E4M3", lambda: _compile_gqa(64, 512, True)),
    ("GQA, D 96, many query heads", lambda: _compile_gqa(256, 96)),
]


# --- on a GPU: full sizes, the shipped plans, graphs

FULL_MLA = [
    ({"lengths": [8192], "NH": 128}, "DeepSeek V3, one sequence"),
    ({"lengths": [4096, 77, 0, 9000, 1, 64, 65, 2000], "NH": 128}, "a ragged batch of eight"),
    ({"lengths": [5000, 300, 20], "NH": 16}, "DeepSeek V2 Lite"),
    ({"lengths": [3000, 7], "NH": 40}, "heads that do not fill a tile"),
    ({"lengths": [3000, 700], "NH": 32, "S": 4}, "four new tokens"),
    ({"lengths": [5000, 300], "NH": 128, "fp8": True}, "E4M3 latents, many heads"),
    ({"lengths": [5000, 300], "NH": 16, "fp8": True}, "E4M3 latents, few heads"),
    ({"lengths": [700, 1, 64, 300], "NH": 40, "S": 2, "fp8": True}, "E4M3, two new tokens"),
    ({"lengths": [5000, 300], "NH": 128, "fp8": True, "page": 16}, "E4M3, small pages, many heads"),
    ({"lengths": [5000, 300], "NH": 16, "fp8": True, "page": 16}, "E4M3, small pages, few heads"),
    ({"lengths": [5000, 300], "NH": 128, "page": 16}, "small pages"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "why"), FULL_MLA, ids=[row[1] for row in FULL_MLA])
def test_mla_decode_full(sizes: dict[str, Any], why: str, device) -> None:
    sizes = {"L": 512, "R": 64, "page": 64} | sizes
    check(mla_decode, ref.mla_decode, mla_inputs(device=device, **sizes))


GQA_SIZES: dict[str, Any] = {"NH": 32, "KVH": 8, "D": 128, "page": 64}
FULL_GQA = [
    ({"lengths": [32768]}, "Qwen3, Mixtral"),
    ({"lengths": [4096, 77, 0, 9000, 1, 64, 65], "NH": 64, "KVH": 4, "D": 128}, "ragged, G = 16"),
    ({"lengths": [3000, 70], "NH": 64, "KVH": 8, "D": 64}, "heads of 64"),
    ({"lengths": [3000, 70], "NH": 8, "KVH": 4, "D": 256, "softcap": 50.0}, "heads of 256, capped"),
    ({"lengths": [3000, 70], "NH": 16, "KVH": 2, "D": 512}, "heads of 512, Gemma 4"),
    ({"lengths": [3000, 70], "window": 1000}, "a window"),
    ({"lengths": [2147, 2148, 2149], "S": 2, "window": 99}, "windows at the edge of a block"),
    ({"lengths": [163, 164, 165], "window": 100, "fp8": True}, "windows at an edge, E4M3"),
    ({"lengths": [3000, 70], "S": 8}, "eight new tokens"),
    ({"lengths": [3000, 70], "fp8": True}, "E4M3"),
    ({"lengths": [3000, 70], "fp8": True, "page": 16}, "E4M3, small"),
    ({"lengths": [4096, 0, 9000, 1, 65], "NH": 64, "KVH": 4, "fp8": True}, "E4M3, G = 16"),
    ({"lengths": [3000, 70], "S": 2, "fp8": True, "window": 1000}, "E4M3, two tokens, a window"),
    ({"lengths": [3000, 70], "page": 16}, "small pages"),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 96}, "heads of 96"),
    ({"lengths": [3000, 70], "NH": 64, "D": 64, "sinks": BF16}, "gpt-oss, a layer of all keys"),
    ({"lengths": [3000, 70], "NH": 64, "D": 64, "sinks": BF16, "window": 128}, "gpt-oss, sliding"),
    ({"lengths": [3000, 70], "sinks": F32}, "sinks, heads of 128"),
    ({"lengths": [3000, 70], "sinks": F32, "fp8": True}, "sinks, heads of 128, E4M3"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "why"), FULL_GQA, ids=[row[1] for row in FULL_GQA])
def test_gqa_decode_full(sizes: dict[str, Any], why: str, device) -> None:
    check(gqa_decode, ref.gqa_decode, gqa_inputs(device=device, **GQA_SIZES | sizes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changed", [{}, {"split_scores": True}, {"split_scores": True, "keys": 32}]
)
def test_mla_plans_of_64_rows_agree(changed: dict[str, Any], device) -> None:
    """Whichever plan is shipped, the others work too."""
    plan = replace(DecodePlan(rows=64, keys=64, num_warps=8, num_stages=2), **changed)
    for heads in (16, 128):
        given = mla_inputs([6000, 0, 500, 65], device, NH=heads, L=512, R=64, page=64)
        check(mla_decode, ref.mla_decode, given, plan=plan)
