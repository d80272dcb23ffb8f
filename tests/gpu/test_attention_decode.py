"""MLA and GQA decode against float64, no worse than torch in bf16; splits, edges, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pykernels import ref
from pykernels.gpu.attention.online_softmax import share_of_slot
from pykernels.gpu.plans.attention import DecodePlan, warp_specialized_takes

from .caches import BF16, FP8, make_cache, no_worse

SMALL = DecodePlan(rows=16, keys=16, warps=4, stages=1)

Call = Callable[..., torch.Tensor]


def mla_inputs(
    lengths: list[int],
    device: torch.device,
    *,
    NH: int = 16,
    S: int = 1,
    page: int = 16,
    L: int = 64,
    R: int = 16,
    fp8: bool = False,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    cache = make_cache(lengths, page, [(L,), (R,)], device, fp8=(fp8, False))
    B = len(lengths)
    q = torch.randn(B, S, NH, L).to(BF16).to(device)
    q_rope = torch.randn(B, S, NH, R).to(BF16).to(device)
    if S == 1:
        q, q_rope = q[:, 0], q_rope[:, 0]
    options = {"scale": (L + R) ** -0.5, "latent_scale": cache.scales[0]}
    return (q, q_rope, *cache.values, cache.table, cache.lengths), options


def gqa_inputs(
    lengths: list[int],
    device: torch.device,
    *,
    NH: int = 8,
    KVH: int = 2,
    D: int = 32,
    S: int = 1,
    page: int = 16,
    fp8: bool = False,
    **options: Any,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    cache = make_cache(lengths, page, [(KVH, D)] * 2, device, fp8=(fp8, fp8))
    q = torch.randn(len(lengths), S, NH, D).to(BF16).to(device)
    options |= {"scale": D**-0.5, "k_scale": cache.scales[0], "v_scale": cache.scales[1]}
    return (q[:, 0] if S == 1 else q, *cache.values, cache.table, cache.lengths), options


def check(
    run: Call, truth: Call, inputs: tuple[torch.Tensor, ...], options: dict[str, Any], **extra: Any
) -> None:
    """Ours, into a poisoned buffer, is as near to float64 as torch's bf16 is."""
    exact = truth(*inputs, **options, dtype=torch.float64)
    native = truth(*inputs, **options, dtype=BF16)
    out = torch.full_like(exact, float("nan"), dtype=BF16)
    assert run(*inputs, **options, out=out, **extra) is out
    no_worse(out, exact, native)


def mla(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    from pykernels.gpu.attention.mla_decode import (
        mla_decode,  # after conftest chose the interpreter
    )

    return mla_decode(*inputs, **options)


def gqa(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    from pykernels.gpu.attention.gqa_decode import gqa_decode

    return gqa_decode(*inputs, **options)


MLA = [
    ({"lengths": [33]}, SMALL, "one sequence, a ragged last block"),
    ({"lengths": [100, 0, 1, 48]}, SMALL, "ragged: an empty sequence, one key, whole blocks"),
    ({"lengths": [70, 3], "NH": 20}, SMALL, "heads that do not fill the last tile"),
    ({"lengths": [70, 3], "NH": 5, "S": 3}, SMALL, "several new tokens, each behind the last"),
    ({"lengths": [2], "NH": 4, "S": 3}, SMALL, "the first token sees no key at all"),
    ({"lengths": [90, 17], "fp8": True}, SMALL, "E4M3 latents beside bf16 rope"),
    ({"lengths": [90], "page": 4}, SMALL, "pages smaller than a block"),
    ({"lengths": [90], "page": 64}, SMALL, "pages larger than a block"),
    (
        {"lengths": [90, 33]},
        replace(SMALL, across=True),
        "the products as Hopper's plan orders them",
    ),
    ({"lengths": [90], "fp8": True}, replace(SMALL, across=True), "the same with E4M3"),
    ({"lengths": [90]}, replace(SMALL, per_sm=0), "one program a sequence: no combining"),
    ({"lengths": [90]}, replace(SMALL, per_sm=9), "more slots than blocks"),
    ({"lengths": [400, 3, 0, 17]}, replace(SMALL, per_sm=4), "a long sequence beside short ones"),
    ({"lengths": [75, 20]}, replace(SMALL, rows=64, keys=32), "a wide tile"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), MLA, ids=[row[2] for row in MLA])
def test_mla_decode(sizes: dict[str, Any], plan: DecodePlan, why: str, device) -> None:
    inputs, options = mla_inputs(device=device, **sizes)
    check(mla, ref.mla_decode, inputs, options, plan=plan)


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
    ({"lengths": [40], "window": 1}, SMALL, "a window of the token itself"),
    ({"lengths": [40], "softcap": 2.0}, SMALL, "capped scores"),
    ({"lengths": [90, 17], "fp8": True}, SMALL, "E4M3 with a scale a token and head"),
    ({"lengths": [90], "page": 4, "window": 33}, SMALL, "pages smaller than a block"),
    ({"lengths": [90]}, replace(SMALL, per_sm=0), "one program a sequence: no combining"),
    ({"lengths": [90, 5]}, replace(SMALL, per_sm=9), "more slots than blocks"),
    ({"lengths": [400, 3, 90], "window": 100}, replace(SMALL, per_sm=4), "slots by what is seen"),
    ({"lengths": [75, 20]}, replace(SMALL, rows=64, keys=32), "a wide tile"),
    (
        {"lengths": [1] * 39 + [300], "NH": 2, "KVH": 1},
        replace(SMALL, per_sm=9),
        "a long sequence beside more than 32",
    ),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), GQA, ids=[row[2] for row in GQA])
def test_gqa_decode(sizes: dict[str, Any], plan: DecodePlan, why: str, device) -> None:
    inputs, options = gqa_inputs(device=device, **sizes)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan)


def test_a_query_without_keys_is_zero(device) -> None:
    inputs, options = mla_inputs([0, 20], device)
    assert mla(*inputs, **options)[0].count_nonzero() == 0
    inputs, options = gqa_inputs([2], device, S=3)
    assert gqa(*inputs, **options)[0, 0].count_nonzero() == 0


def test_huge_scores_do_not_overflow(device) -> None:
    inputs, options = gqa_inputs([60], device)
    check(gqa, ref.gqa_decode, (inputs[0] * 300, *inputs[1:]), options, plan=SMALL)


def test_rows_of_zeros_may_have_a_scale_of_zero(device) -> None:
    """A quantizer that does not guard itself makes such: they are values like others."""
    inputs, options = gqa_inputs([40, 9], device, fp8=True)
    q, k, v, table, lengths = inputs
    for x, name in ((k, "k_scale"), (v, "v_scale")):
        page = int(table[0, 0])
        x.view(torch.uint8)[page, :5] = 0
        options[name][page, :5] = 0
    check(gqa, ref.gqa_decode, inputs, options, plan=SMALL)
    inputs, options = mla_inputs([40, 9], device, fp8=True)
    page = int(inputs[4][0, 0])
    inputs[2].view(torch.uint8)[page, :5] = 0
    options["latent_scale"][page, :5] = 0
    check(mla, ref.mla_decode, inputs, options, plan=SMALL)


def test_a_plan_is_asked_for_by_the_keys_that_a_window_leaves(
    device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pykernels.gpu.attention import gqa_decode

    asked = []
    monkeypatch.setattr(gqa_decode, "select_decode", lambda op, shape, *_: asked.append(shape))
    inputs, options = gqa_inputs([90], device, S=2)
    for how in ({"window": 20}, {"window": 500}, {}, {"max_length": 95}):
        with pytest.raises(AttributeError):
            gqa(*inputs, **options, **how)
    room = inputs[3].shape[1] * 16
    assert [shape.context for shape in asked] == [21, room, room, 95]
    assert [shape.window for shape in asked] == [20, 500, 0, 0]


def test_no_sequences(device) -> None:
    inputs, options = mla_inputs([5], device)
    empty = (inputs[0][:0], inputs[1][:0], *inputs[2:4], inputs[4][:0], inputs[5][:0])
    assert mla(*empty, **options).shape == (0, *inputs[0].shape[1:])


def test_transposed_queries_need_no_copy(device) -> None:
    """The absorbed projection is a batched product over heads: [NH, B, L]."""
    inputs, options = mla_inputs([50, 31], device)
    turned = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:2])
    assert not turned[0].is_contiguous()
    assert torch.equal(mla(*turned, *inputs[2:], **options), mla(*inputs, **options))


def test_queries_may_be_part_of_a_wider_projection(device) -> None:
    inputs, options = gqa_inputs([50, 31], device, S=2)
    q = torch.randn(2, 3, 16, 48, device=device).to(BF16)[:, :2, :8, :32]
    dense = gqa(q.contiguous(), *inputs[1:], **options)
    assert torch.equal(gqa(q, *inputs[1:], **options), dense)


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _compile_mla(NH: int, fp8: bool = False, page: int = 64) -> None:
    kind, scale = (FP8, _meta(9, page, dtype=torch.float32)) if fp8 else (BF16, None)
    where = (_meta(2, 99, dtype=torch.int32), _meta(2, dtype=torch.int32))
    caches = (_meta(9, page, 512, dtype=kind), _meta(9, page, 64))
    mla(_meta(2, NH, 512), _meta(2, NH, 64), *caches, *where, scale=0.1, latent_scale=scale)


def _compile_gqa(NH: int, D: int, fp8: bool = False, **options: Any) -> None:
    kind, scale = (FP8, _meta(9, 64, 8, dtype=torch.float32)) if fp8 else (BF16, None)
    caches = [_meta(9, 64, 8, D, dtype=kind)] * 2
    where = (_meta(2, 99, dtype=torch.int32), _meta(2, dtype=torch.int32))
    options |= {"scale": 0.1, "k_scale": scale, "v_scale": scale}
    gqa(_meta(2, NH, D), *caches, *where, **options)


_BOTH = {"window": 99, "softcap": 9.0}
COMPILES = [
    ("MLA, 128 heads", lambda: _compile_mla(128)),
    ("MLA, 16 heads", lambda: _compile_mla(16)),
    ("MLA, 128 heads, E4M3", lambda: _compile_mla(128, fp8=True)),
    ("MLA, 16 heads, E4M3, small pages", lambda: _compile_mla(16, fp8=True, page=16)),
    ("GQA, D 128", lambda: _compile_gqa(32, 128)),
    ("GQA, D 128, E4M3", lambda: _compile_gqa(32, 128, fp8=True)),
    ("GQA, D 128, E4M3, 16 rows, window, cap", lambda: _compile_gqa(128, 128, True, **_BOTH)),
    ("GQA, D 96, E4M3", lambda: _compile_gqa(32, 96, fp8=True)),
    ("GQA, D 256, window, cap", lambda: _compile_gqa(16, 256, **_BOTH)),
    ("GQA, D 96, many query heads", lambda: _compile_gqa(256, 96)),
]


def test_slots_fill_the_gpu_once_and_know_no_lengths() -> None:
    plan = DecodePlan(rows=64, keys=64, warps=8, stages=2, per_sm=1)
    assert plan.slots(1, 2, 66 * 640, 132) == 66
    assert plan.slots(1, 2, 1 << 16, 132) == 64  # 16 blocks each: two more would be empty
    assert plan.slots(8, 2, 1 << 16, 132) == 66
    assert plan.slots(1, 2, 1 << 13, 132) == 64
    assert replace(plan, least=3).slots(1, 2, 1 << 13, 132) == 43
    assert replace(plan, least=3).slots(4, 2, 100, 132) == 4
    assert plan.slots(100, 2, 1 << 16, 132) == 100  # more sequences than room
    assert replace(plan, per_sm=32).slots(65, 2, 1 << 16, 132) == 65  # a program each fills it
    assert replace(plan, per_sm=32).slots(64, 2, 1 << 16, 132) > 64
    assert plan.slots(1, 1, 100, 132) == 2  # no more than there are blocks
    assert plan.slots(8, 132, 1 << 16, 132) == 8


@triton.jit
def _deal(length_ptr, out, B, slots, BATCH: tl.constexpr):
    b, length, part, parts = share_of_slot(
        length_ptr, tl.program_id(0), B, slots, 1, 0, 16, BATCH, False
    )
    at = out + tl.program_id(0) * 4
    tl.store(at, b)
    tl.store(at + 1, length)
    tl.store(at + 2, part)
    tl.store(at + 3, parts)


@pytest.mark.parametrize("lengths", [[1000, 3, 0, 40], [5] * 7, [0, 0], [64 * 99], [300, 299, 301]])
@pytest.mark.parametrize("slots", [0, 1, 5, 60])
def test_every_part_of_every_sequence_is_dealt_out_once(
    lengths: list[int], slots: int, device
) -> None:
    """Slots are in the sequences' order, one at least each, and a long one's parts are even."""
    B = len(lengths)
    where = torch.tensor(lengths, dtype=torch.int32, device=device)
    dealt = torch.full((B + slots, 4), -1, dtype=torch.int32, device=device)
    _deal[(B + slots,)](where, dealt, B, B + slots, BATCH=triton.next_power_of_2(B))
    used = [row for row in dealt.tolist() if row[3]]
    found: dict[int, list[int]] = {b: [] for b in range(B)}
    for b, length, part, parts in used:
        assert length == lengths[b]
        found[b].append(part)
        assert parts == 1 + slots * -(-length // 16) // max(1, sum(-(-n // 16) for n in lengths))
    assert used == sorted(used, key=lambda row: (row[0], row[2]))
    counts = {row[0]: row[3] for row in used}
    assert all(found[b] == list(range(counts[b])) for b in range(B))


# --- on a GPU: full sizes, the shipped plans, graphs

FULL_MLA = [
    ({"lengths": [8192], "NH": 128}, "DeepSeek V3, one sequence"),
    ({"lengths": [4096, 77, 0, 9000, 1, 64, 65, 2000], "NH": 128}, "a ragged batch of eight"),
    ({"lengths": [5000, 300], "NH": 64}, "Kimi K2"),
    ({"lengths": [5000, 300, 20], "NH": 16}, "DeepSeek V2 Lite"),
    ({"lengths": [3000, 7], "NH": 40}, "heads that do not fill a tile"),
    ({"lengths": [3000, 700], "NH": 32, "S": 4}, "four new tokens"),
    ({"lengths": [5000, 300], "NH": 128, "fp8": True}, "E4M3 latents, many heads"),
    ({"lengths": [5000, 300], "NH": 16, "fp8": True}, "E4M3 latents, few heads"),
    ({"lengths": [700, 1, 64, 300], "NH": 40, "S": 2, "fp8": True}, "E4M3, two new tokens"),
    ({"lengths": [5000, 300], "NH": 64, "fp8": True, "page": 256}, "E4M3, large pages"),
    ({"lengths": [5000, 300], "NH": 128, "fp8": True, "page": 16}, "E4M3, small pages, many heads"),
    ({"lengths": [5000, 300], "NH": 16, "fp8": True, "page": 16}, "E4M3, small pages, few heads"),
    ({"lengths": [5000, 300], "NH": 128, "page": 16}, "small pages"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "why"), FULL_MLA, ids=[row[1] for row in FULL_MLA])
def test_mla_decode_full(sizes: dict[str, Any], why: str, device) -> None:
    inputs, options = mla_inputs(device=device, **{"L": 512, "R": 64, "page": 64} | sizes)
    check(mla, ref.mla_decode, inputs, options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    "changed",
    [
        {"warp_specialized": True},
        {"warp_specialized": True, "per_sm": 0},
        {"across": True},
        {"across": False},
        {"across": True, "keys": 32, "stages": 3},
    ],
)
def test_mla_decode_plans_agree(heads: int, changed: dict[str, Any], device) -> None:
    """Whichever plan is shipped, the others work too."""
    if changed.get("warp_specialized") and not warp_specialized_takes(512, 64, False, 64, device):
        pytest.skip("written for Hopper")
    inputs, options = mla_inputs([6000, 0, 500, 65], device, NH=heads, L=512, R=64, page=64)
    plan = replace(DecodePlan(rows=64, keys=64, warps=8, stages=2), **changed)
    check(mla, ref.mla_decode, inputs, options, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"S": 2, "NH": 40}, {"page": 16}, {"page": 128}])
def test_mla_decode_warp_specialized(sizes: dict[str, Any], device) -> None:
    if not warp_specialized_takes(512, 64, False, 64, device):
        pytest.skip("written for Hopper")
    shape = {"NH": 128, "L": 512, "R": 64, "page": 64} | sizes
    inputs, options = mla_inputs([700, 1, 64, 300], device, **shape)
    plan = DecodePlan(rows=64, keys=64, warps=8, stages=1, warp_specialized=True)
    check(mla, ref.mla_decode, inputs, options | {"softcap": 20.0}, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_mla_decode_warp_specialized_has_no_race(fp8: bool, device) -> None:
    """The same bits again and again: each warpgroup reads what the other wrote."""
    inputs, options = mla_inputs([9000, 4000], device, NH=128, L=512, R=64, page=64, fp8=fp8)
    once = mla(*inputs, **options)
    assert all(torch.equal(once, mla(*inputs, **options)) for _ in range(50))


FULL_GQA = [
    ({"lengths": [32768], "NH": 32, "KVH": 8, "D": 128}, "Qwen3, Mixtral"),
    ({"lengths": [4096, 77, 0, 9000, 1, 64, 65], "NH": 64, "KVH": 4, "D": 128}, "ragged, G = 16"),
    ({"lengths": [3000, 70], "NH": 96, "KVH": 8, "D": 128}, "GLM 4.5: G = 12"),
    ({"lengths": [3000, 70], "NH": 16, "KVH": 16, "D": 128}, "multi-head"),
    ({"lengths": [3000, 70], "NH": 64, "KVH": 8, "D": 64}, "heads of 64"),
    ({"lengths": [3000, 70], "NH": 8, "KVH": 4, "D": 256, "softcap": 50.0}, "heads of 256, capped"),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 128, "window": 1000}, "a window"),
    (
        {"lengths": [2147, 2148, 2149], "NH": 32, "KVH": 8, "D": 128, "S": 2, "window": 99},
        "windows at the edge of a block",
    ),
    (
        {"lengths": [163, 164, 165], "NH": 32, "KVH": 8, "D": 128, "window": 100, "fp8": True},
        "windows at the edge of a block, E4M3",
    ),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 128, "S": 8}, "eight new tokens"),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 128, "fp8": True}, "E4M3"),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 128, "fp8": True, "page": 16}, "E4M3, small"),
    (
        {"lengths": [4096, 0, 9000, 1, 65], "NH": 64, "KVH": 4, "D": 128, "fp8": True},
        "E4M3, G = 16",
    ),
    (
        {"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 128, "S": 2, "fp8": True, "window": 1000},
        "E4M3, two new tokens, a window",
    ),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 128, "page": 16}, "small pages"),
    ({"lengths": [3000, 70], "NH": 32, "KVH": 8, "D": 96}, "heads of 96"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "why"), FULL_GQA, ids=[row[1] for row in FULL_GQA])
def test_gqa_decode_full(sizes: dict[str, Any], why: str, device) -> None:
    inputs, options = gqa_inputs(device=device, **{"page": 64} | sizes)
    check(gqa, ref.gqa_decode, inputs, options)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["mla", "gqa"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_replayed_with_other_inputs_is_eager_to_the_bit(
    kernel: str, fp8: bool, device
) -> None:
    lengths = [3000, 70, 1200]
    if kernel == "mla":
        run = mla
        inputs, options = mla_inputs(lengths, device, NH=128, L=512, R=64, page=64, fp8=fp8)
    else:
        run = gqa
        inputs, options = gqa_inputs(lengths, device, NH=32, KVH=8, D=128, page=64, fp8=fp8)
    run(*inputs, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*inputs, **options)
    inputs[-1].copy_(torch.tensor([2500, 69, 1], device=device))
    inputs[0].copy_(torch.randn_like(inputs[0]))
    captured.fill_(float("nan"))
    graph.replay()
    replayed = captured.clone()
    assert torch.equal(replayed, run(*inputs, **options))
    assert not replayed.isnan().any()
