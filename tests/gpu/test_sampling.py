"""Sampling: the very tokens that the definition draws; the definition's own statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.gpu.sampling import greedy, sample
from pykernels.ref.sampling import kept, perturbed, philox

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def full(value: float, T: int, device: torch.device, dtype=torch.float32) -> torch.Tensor:
    return torch.full((T,), value, dtype=dtype, device=device)


def state(seed: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([seed, step], device=device)


def limits_of(k: int | None, p: float | None, T: int, device: torch.device) -> list[Any]:
    """``top_k`` and ``top_p``, the same for all rows."""
    top_k = None if k is None else full(k, T, device, torch.int32)
    return [top_k, None if p is None else full(p, T, device)]


def assert_drawn(found: torch.Tensor, logits: torch.Tensor, *given: torch.Tensor | None) -> None:
    """Each token may be drawn, and none that may be drawn beats it by more than rounding."""
    logits, (at, heat, *limits) = logits.float().cpu(), (x if x is None else x.cpu() for x in given)
    stay = kept(logits, heat, *limits, dtype=torch.float64)
    noisy = perturbed(logits, at, heat, torch.float64)
    best = noisy.masked_fill(~stay, -torch.inf).amax(-1)
    mine = found.cpu().unsqueeze(1)
    assert stay.gather(1, mine).all()
    assert (best - noisy.gather(1, mine).squeeze(1) <= 1e-5 * best.abs().clamp_min(1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "V"),
    [(0, 9), (1, 1), (3, 2048), (2, 5000), pytest.param(8, 163_840, marks=pytest.mark.gpu)],
)
def test_greedy(T: int, V: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(T, V + 3, device=device).to(dtype)[:, :V]
    assert torch.equal(greedy(logits), ref.greedy(logits))


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(3, 4500, device=device)
    logits[1, [4400, 2100]] = 1.0
    logits[2] = -torch.inf
    assert greedy(logits).tolist() == [0, 2100, 0]


LIMITS = [(None, None), (5, None), (None, 0.7), (50, 0.9), (1, None), (None, 0.0), (0, 1.0)]


@pytest.mark.parametrize(("k", "p"), LIMITS)
@pytest.mark.parametrize(
    ("T", "V"), [(1, 1), (3, 2100), pytest.param(4, 163_840, marks=pytest.mark.gpu)]
)
def test_sample(T: int, V: int, k: int | None, p: float | None, device: torch.device) -> None:
    logits = (torch.randn(T, V, device=device) * 3).to(torch.float32 if T == 1 else torch.bfloat16)
    for step in range(2):
        at = state(123456789012345, step, device)
        given = at, full(0.8, T, device), *limits_of(k, p, T, device)
        assert_drawn(sample(logits, *given), logits, *given)


def test_rows_have_their_own_limits(device: torch.device) -> None:
    logits = torch.randn(6, 700, device=device) * 2
    heat = torch.tensor([0.0, 1.0, 2.0, 0.5, 0.0, 1.0], device=device)
    top_k = torch.tensor([3, 0, 7, 9999, -1, 1], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.5, 1.0, 0.6, 0.1, 1.0, 0.9], device=device)
    at = state(7, 1 << 33, device)
    found = sample(logits, at, heat, top_k, top_p)
    assert_drawn(found, logits, at, heat, top_k, top_p)
    best = greedy(logits)
    assert all(found[i] == best[i] for i in (0, 4, 5))


def test_equal_logits_share_their_fate_and_masked_ones_are_out(device: torch.device) -> None:
    logits = torch.full((40, 64), -torch.inf, device=device)
    logits[:, 10:14] = 2.0
    logits[:, 20:30] = 1.0
    top_k = full(2, 40, device, torch.int32)  # the four at 2.0 are all as large as the second
    found = sample(logits, state(1, 1, device), full(1.0, 40, device), top_k)
    assert set(found.tolist()) == {10, 11, 12, 13}
    top_p = full(0.99999, 40, device)
    found = sample(logits, state(1, 1, device), full(5.0, 40, device), None, top_p)
    drawn = set(found.tolist())
    assert drawn <= {*range(10, 14), *range(20, 30)} and len(drawn) > 6
    logits = torch.full((40, 8), -1.0, device=device)
    logits[:, 2], logits[:, 5] = 0.0, -0.0  # equal too
    found = sample(logits, state(1, 1, device), full(1.0, 40, device), top_k // 2)
    assert set(found.tolist()) == {2, 5}


@pytest.mark.parametrize(("k", "p"), [(None, None), (50, 0.9)])
def test_the_first_nan_is_drawn_whatever_the_limits(
    k: int | None, p: float | None, device: torch.device
) -> None:
    logits = torch.randn(5, 300, device=device)
    logits[0, [200, 7]] = torch.nan
    logits[1, 9] = -torch.tensor(torch.nan)  # its sign means nothing
    logits[2, [3, 8]] = torch.tensor([torch.inf, torch.nan], device=device)
    logits[3] = torch.nan
    for heat in (0.8, 0.0):
        given = state(3, 4, device), full(heat, 5, device), *limits_of(k, p, 5, device)
        found = sample(logits, *given)
        assert found[:4].tolist() == greedy(logits)[:4].tolist() == [7, 9, 8, 0]
        assert torch.equal(found, ref.sample(logits, *given))


@pytest.mark.parametrize(("k", "p"), [(None, None), (50, 0.9)])
def test_temperatures_that_cannot_divide_are_greedy(
    k: int | None, p: float | None, device: torch.device
) -> None:
    logits = torch.randn(4, 300, device=device) * 20
    heat = torch.tensor([1e-40, 1e-31, 1e-30, torch.nan], device=device)
    given = state(3, 4, device), heat, *limits_of(k, p, 4, device)
    found = sample(logits, *given)
    assert torch.equal(found, ref.sample(logits, *given))
    assert torch.equal(found, greedy(logits))


def test_a_flat_nucleus_takes_several_rounds(device: torch.device) -> None:
    """With p = 0.01 of 300 nearly equal logits almost every candidate is refused."""
    logits = torch.linspace(0, 1e-3, 300, device=device).expand(5, -1).contiguous()
    given = state(3, 0, device), full(1.0, 5, device), None, full(0.01, 5, device)
    found = sample(logits, *given)
    assert_drawn(found, logits, *given)
    assert (found >= 296).all()


def test_a_seed_and_step_draw_the_same_and_another_step_not(device: torch.device) -> None:
    logits, heat = torch.zeros(4, 1000, device=device), full(1.0, 4, device)
    draws = [sample(logits, state(5, step, device), heat).tolist() for step in (0, 0, 1, 1 << 32)]
    assert draws[0] == draws[1]
    assert len({tuple(row) for row in draws}) == 3
    assert len(set(draws[0])) > 1  # rows are independent


@pytest.mark.parametrize("least", [1e38, -3e38])
def test_logits_that_overflow_leave_the_nucleus_its_largest(
    least: float, device: torch.device
) -> None:
    logits = torch.linspace(least, least + 2e38, 300, device=device).expand(4, -1)
    given = state(3, 4, device), full(0.1, 4, device), None, full(0.9, 4, device)
    found = sample(logits, *given)
    assert torch.equal(found, ref.sample(logits, *given)) and torch.equal(found, greedy(logits))


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123: all zeros, all ones, digits of pi."""
    word = torch.tensor
    assert philox(0, *(word(0),) * 4) == 0x6627E8D5
    assert philox((1 << 64) - 1, *(word(0xFFFFFFFF),) * 4) == 0x408F276D
    pi = (word(n) for n in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert philox(0xA4093822 | 0x299F31D0 << 32, *pi) == 0xD16CFE09


def test_draws_follow_the_softmax() -> None:
    """The definition's frequencies over 60000 rows, within five standard deviations."""
    T, logits = 60_000, torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, -torch.inf])
    for heat in (1.0, 0.5):
        noisy = perturbed(logits.expand(T, -1), torch.tensor([99, 3]), torch.full((T,), heat))
        share = torch.bincount(noisy.argmax(-1), minlength=6) / T
        odds = (logits / heat).softmax(-1)
        assert ((share - odds).abs() <= 5 * (odds * (1 - odds) / T).sqrt()).all()


def test_kept_is_what_transformers_keeps() -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(20, 200) * 3
    for k, p, heat in ((7, 0.8, 0.7), (200, 0.95, 1.3), (30, 0.3, 1.0)):
        scores = process.TemperatureLogitsWarper(heat)(None, logits)
        scores = process.TopKLogitsWarper(k)(None, scores)
        scores = process.TopPLogitsWarper(p)(None, scores)
        mine = kept(logits, *(torch.full((20,), x) for x in (heat, k, p)))
        assert torch.equal(mine, scores > -torch.inf)


def _compile(V: int, dtype=torch.float32) -> None:
    meta = torch.device("meta")
    at, logits = torch.empty(2, device=meta).long(), torch.empty(4, V, device=meta, dtype=dtype)
    sample(logits, at, full(1, 4, meta), full(1, 4, meta, torch.int32), full(1, 4, meta))


COMPILES = [
    ("greedy", lambda: greedy(torch.empty(4, 163_840, device="meta", dtype=torch.bfloat16))),
    ("top-k and top-p", lambda: _compile(129_280)),
]
COMPILES_ON_A_GPU = [("top-k and top-p, bfloat16", lambda: _compile(163_840, torch.bfloat16))]
