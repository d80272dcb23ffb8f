"""Pairs go to the members that have their experts, and the sums come back: what one rank makes."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.copy_filled import copy_filled
from pykernels.gpu.moe.pairs import place_pairs, sum_pairs, take_pairs

STARTS = (0, 3, 5, 8)


@pytest.mark.parametrize(("T", "H"), [(1, 16), (37, 600)])
def test_each_token_gets_the_sum_of_its_experts(T: int, H: int, device: torch.device) -> None:
    """Of experts that multiply by a number of their own."""
    x = torch.randn(T, H, device=device).bfloat16()
    ids = torch.rand(T, 8, device=device).argsort(1)[:, :4].int()
    ids[0, 1] = -1
    weights = torch.rand(T, 4, device=device)
    places, counts = place_pairs(ids, STARTS)
    back = []
    for member, (first, last) in enumerate(zip(STARTS, STARTS[1:], strict=False)):
        taken = take_pairs(x, ids, weights, places, (first, last), T * 4 + 3)
        count = int(counts[member])
        assert count == int(((ids >= first) & (ids < last)).sum())
        assert (taken.ids[count:] == -1).all() and (taken.ids[:count] >= 0).all()
        truth = ref.take_pairs(x, ids, weights, places, (first, last), T * 4 + 3)
        assert all(torch.equal(a[:count], b[:count]) for a, b in zip(taken, truth, strict=True))
        there = torch.full_like(taken.rows, torch.nan)
        copy_filled(taken.rows, there, counts[member : member + 1])
        factor = taken.factors * (taken.ids + first + 1)
        back.append((there[: len(factor)].float() * factor).bfloat16())
    out = sum_pairs(back, ids, places, STARTS)
    expected = x.float() * (weights * (ids + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(out, ref.sum_pairs(back, ids, places, STARTS))


def test_too_little_room_is_refused(device: torch.device) -> None:
    x, ids = torch.zeros(3, 8, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    with pytest.raises(PykernelsError, match=r"room for \(5, 8\) .* of 6 pairs"):
        take_pairs(x, ids, ids.float(), ids, (0, 1), 5)
    with pytest.raises(PykernelsError, match=r"rows of 1 members, experts \(0, 1, 2\)"):
        sum_pairs([x], ids, ids, (0, 1, 2))
    with pytest.raises(PykernelsError, match="the count is torch.int32"):
        copy_filled(x, x.clone(), ids[0])


def _compile() -> None:
    meta = torch.device("meta")
    x = torch.empty(9, 7168, device=meta, dtype=torch.bfloat16)
    ids = torch.empty(9, 8, device=meta, dtype=torch.int32)
    take_pairs(x, ids, ids.float(), ids, (0, 128), 72)
    sum_pairs([x.new_empty(72, 7168)] * 2, ids, ids, (0, 128, 256))
    copy_filled(x, x.clone(), torch.empty(1, device=meta, dtype=torch.int32))


COMPILES = [("pairs", _compile)]
