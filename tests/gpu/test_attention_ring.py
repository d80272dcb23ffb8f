"""GQA decode through a ring of blocks, on any CPU: its arithmetic, turns, pages and masks.

On a GPU test_attention_decode.py runs the real one, and here are other plans.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

import pykernels.gpu.common.launch as launch
from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.plans.attention import DecodePlan, in_ring_takes

from .test_attention_decode import check, gqa, gqa_inputs


@pytest.fixture
def ring(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the interpreter's version in the kernel's place; skips where the real one cannot run."""
    if not launch.interpreted():
        if not in_ring_takes(128, False, 64, device, True):
            pytest.skip("the kernel is for Hopper")
        return
    from pykernels.gpu.attention import gqa_decode
    from pykernels.gpu.attention.hopper import gqa_decode as hopper_gqa_decode

    from .gluon_shim import interpreted

    kernel = interpreted(hopper_gqa_decode.gqa_decode_ring)
    monkeypatch.setattr(hopper_gqa_decode, "gqa_decode_ring", kernel)
    monkeypatch.setattr(gqa_decode, "in_ring_takes", lambda *lies: True)


def plan(stages: int = 2, per_sm: int = 1) -> DecodePlan:
    return DecodePlan(rows=16, keys=64, warps=4, stages=stages, per_sm=per_sm, in_ring=True)


CASES = [
    ({"lengths": [100, 0, 64, 1]}, plan(), "ragged: an empty sequence, one key, a whole block"),
    ({"lengths": [300, 33]}, plan(per_sm=0), "a ring that turns, no combining"),
    (
        {"lengths": [190, 2], "NH": 11, "S": 2, "window": 70, "softcap": 2.0},
        plan(3),
        "two tiles of sixteen rows, tokens, window, cap",
    ),
    ({"lengths": [135, 136], "S": 2, "window": 71}, plan(), "windows at the edge of a block"),
    ({"lengths": [2200], "page": 128}, plan(per_sm=0), "pages are asked for 32 blocks at a time"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), CASES, ids=[row[2] for row in CASES])
def test_gqa_decode_through_a_ring(
    sizes: dict[str, Any], plan: DecodePlan, why: str, device, ring
) -> None:
    shape: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 64} | sizes
    inputs, options = gqa_inputs(device=device, **shape)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("per_sm", [0, 1, 3])
@pytest.mark.parametrize("page", [64, 256])
def test_plans_agree(stages: int, per_sm: int, page: int, device, ring) -> None:
    sizes: dict[str, Any] = {"NH": 24, "KVH": 2, "D": 128, "page": page}
    inputs, options = gqa_inputs([6000, 0, 500, 65, 128], device, **sizes)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan(stages, per_sm))


@triton.jit
def _late(length, table, new_length, new_table, N, ROUNDS, BLOCK: tl.constexpr):
    """Lets the next kernel begin, works for some 50 us, and then writes what that one reads."""
    gdc_launch_dependents()
    x = ROUNDS
    for _ in range(ROUNDS):
        x = x * 1664525 + 1013904223
    i = tl.arange(0, BLOCK) + (x == 12345)
    tl.store(length, tl.load(new_length))
    tl.store(table + i, tl.load(new_table + i, mask=i < N, other=0), mask=i < N)


@pytest.mark.gpu
def test_what_the_kernel_in_front_writes_late_is_seen(device, ring) -> None:
    inputs, options = gqa_inputs([3000], device, NH=32, KVH=8, D=128, page=64)
    *given, table, length = inputs
    expected = gqa(*inputs, **options)
    for garbage in (0, -7, 100, 1 << 30):
        late_table, late_length = torch.full_like(table, garbage), torch.full_like(length, garbage)
        torch.cuda.synchronize()
        _late[(1,)](late_length, late_table, length, table, table.numel(), 20000, BLOCK=64)
        assert torch.equal(gqa(*given, late_table, late_length, **options), expected)


@pytest.fixture
def last_part(device: torch.device) -> Any:
    from pykernels.gpu.attention.hopper import split_kv

    return split_kv


@pytest.mark.parametrize("lies", ["zero", "ones", "other calls", "nearly this call"])
def test_whatever_lies_in_the_words_parts_are_counted(
    lies: str, device, ring, last_part, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"NH": 12, "KVH": 2, "D": 128, "page": 64}
    inputs, options = gqa_inputs([200, 0, 65], device, **sizes)
    counted, seen = last_part.counted, []

    def filled(device: torch.device, sequences: int) -> tuple[torch.Tensor, int]:
        words, number = counted(device, sequences)
        other = number ^ (1 << 62 if len(seen) else 1 << 16) | 1
        words.fill_({"zero": 0, "ones": -1, "other calls": 3, "nearly this call": other}[lies])
        seen.append((words, number))
        return words, number

    monkeypatch.setattr(last_part, "counted", filled)
    for _ in range(2):
        check(gqa, ref.gqa_decode, inputs, options, plan=plan(per_sm=2))
    assert [len(words) for words, _ in seen] == [3 * 2] * 2
    assert not any(words.any() for words, _ in seen)
    assert seen[0][1] != seen[1][1]


def test_no_call_has_the_number_of_another(device, last_part) -> None:
    numbers = [last_part.counted(device, 1)[1] for _ in range(1000)]
    assert len(set(numbers)) == 1000
    assert all(1 << 62 <= number < 1 << 63 and number % (1 << 16) == 0 for number in numbers)


def test_many_rows_of_many_parts_are_combined_by_many_programs(
    device, ring, last_part, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert last_part.worth_it(4, 16) and not last_part.worth_it(16, 33)
    inputs, options = gqa_inputs([200, 3], device, NH=4, KVH=1, D=128, page=64)
    monkeypatch.setattr(last_part, "worth_it", lambda rows, parts: False)
    monkeypatch.setattr(last_part, "counted", None)
    check(gqa, ref.gqa_decode, inputs, options, plan=plan())


def _calls(count: int, device: torch.device) -> tuple[list[tuple[Any, Any]], list[torch.Tensor]]:
    """Calls with inputs of their own, and their results one at a time."""
    sizes: dict[str, Any] = {"NH": 32, "KVH": 8, "D": 128, "page": 64}
    calls = [gqa_inputs([3000 + 64 * i, 100], device, **sizes) for i in range(count)]
    results = []
    for inputs, options in calls:
        results.append(gqa(*inputs, **options))
        torch.cuda.synchronize()
    return calls, results


@pytest.mark.gpu
def test_two_streams_at_once(device, ring) -> None:
    calls, expected = _calls(2, device)
    streams, found = [torch.cuda.Stream() for _ in calls], []
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, (inputs, options) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(gqa(*inputs, **options))
    torch.cuda.synchronize()
    for i, result in enumerate(found):
        assert torch.equal(result, expected[i % 2])


@pytest.mark.gpu
def test_two_graphs_of_many_calls_at_once_and_again(device, ring) -> None:
    calls, expected = _calls(6, device)
    graphs, streams, found = [], [torch.cuda.Stream() for _ in range(2)], []
    for mine in (calls[:3], calls[3:]):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append([gqa(*inputs, **options) for _ in range(10) for inputs, options in mine])
    for _ in range(5):
        for result in (*found[0], *found[1]):
            result.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(4):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for i, results in enumerate(found):
            for j, result in enumerate(results):
                assert torch.equal(result, expected[3 * i + j % 3])


@pytest.mark.parametrize("bad", [{"fp8": True}, {"page": 16}, {"D": 64}], ids=str)
def test_what_the_ring_does_not_take_is_refused(bad: dict[str, Any], device) -> None:
    shape: dict[str, Any] = {"NH": 4, "KVH": 1, "D": 128, "page": 64} | bad
    inputs, options = gqa_inputs([20], device, **shape)
    with pytest.raises(PykernelsError, match="a plan with a ring for"):
        gqa(*inputs, **options, plan=plan())
