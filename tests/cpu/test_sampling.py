"""Sampling by request: the tokens that the definition draws, whoever runs the tasks."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from pykernels.cpu.intrin.sync import call_task
from pykernels.cpu.jit import kernel
from pykernels.cpu.sampling import make_ops, prepare, sample, sample_requests, sizes
from pykernels.errors import PykernelsError
from pykernels.ref import sampling as truth
from pykernels.ref.sampling import Sampled, SamplingRequest
from pykernels.ref.sampling.inputs import inputs_of

INF, NAN = math.inf, math.nan
LEAD = 2e-5
"""Draws that differ by less, of their size or of 1, may come out in either order."""


def random_request(V: int, rng: random.Random) -> SamplingRequest:
    """Any parameters, each as its default about half of the time."""

    def some(default: Any, *values: Any) -> Any:
        return default if rng.random() < 0.5 else rng.choice(values)

    g = torch.Generator().manual_seed(rng.getrandbits(32))
    seen = torch.randperm(V, generator=g)[: rng.randrange(V + 1)].int()
    counts = torch.randint(0, 4, (len(seen),), generator=g, dtype=torch.int32)
    bias_ids = torch.randperm(V, generator=g)[: rng.randrange(min(V, 40) + 1)].int()
    bias = 10 * torch.randn(len(bias_ids), generator=g)
    penalties = rng.random() < 0.4
    biased = rng.random() < 0.4
    mask = torch.rand(V, generator=g) < rng.choice((0.02, 0.5, 0.98))
    mask[rng.randrange(V)] = True
    return SamplingRequest(
        temperature=some(1.0, 0.0, 0.3, 0.8, 2.5),
        top_k=some(0, 1, 2, 40, 3000, V - 1, V, V + 1, -1),
        top_p=some(1.0, 0.0, 0.1, 0.5, 0.9, 0.999, 1.5),
        min_p=some(0.0, 0.001, 0.05, 0.5, 1.0),
        repetition=some(1.0, 0.7, 1.3),
        presence=some(0.0, 0.6, -0.6),
        frequency=some(0.0, 0.4, -0.4),
        seen=seen if penalties else None,
        counts=counts if penalties else None,
        bias_ids=bias_ids if biased else None,
        bias=bias if biased else None,
        mask=some(None, mask),
        seed=rng.getrandbits(64) - (1 << 63),
        draws=some(0, 5, 1 << 40),
        logprobs=some(-1, 0, 1, 20),
    )


def lead_of(row: torch.Tensor, request: SamplingRequest, token: int, other: int) -> float:
    """By how much a token's perturbed logit is above another's, of its size."""
    logits = truth.adjusted(row, request).unsqueeze(0)
    state = torch.tensor([request.seed, request.draws])
    heat = torch.tensor([request.temperature])
    noisy = truth.perturbed(logits, state, heat, torch.float64)[0]
    return float((noisy[token] - noisy[other]).abs() / noisy[token].abs().clamp_min(1))


def assert_same(ours: Sampled, theirs: Sampled) -> None:
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.top_ids, theirs.top_ids)
    for name in ("logprobs", "top_logprobs"):
        a, b = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("V", "R", "rounds"),
    [(1, 8, 5), (9, 32, 20), (257, 64, 10), (5003, 64, 10), (33_001, 32, 10), (151_936, 20, 1)],
)
def test_the_tokens_of_the_definition(V: int, R: int, rounds: int) -> None:
    rng, g = random.Random(V), torch.Generator().manual_seed(V)
    for turn in range(rounds):
        logits = torch.randn(R, V, generator=g) * (0.5 + turn % 5)
        if turn % 3 == 2:
            logits = logits.bfloat16().float()  # many are equal
        requests = [random_request(V, rng) for _ in range(R)]
        ours, theirs = sample_requests(logits, requests), truth.sample_requests(logits, requests)
        for r in (ours.tokens != theirs.tokens).nonzero().flatten().tolist():
            found = int(ours.tokens[r]), int(theirs.tokens[r])
            assert lead_of(logits[r], requests[r], *found) < LEAD, (found, requests[r])
            ours.tokens[r], ours.logprobs[r] = theirs.tokens[r], theirs.logprobs[r]
        assert_same(ours, theirs)


def many(value: float, **places: float) -> torch.Tensor:
    row = torch.full((1000,), value)
    for place, other in places.items():
        row[int(place[1:])] = other
    return row


EDGES = {
    "all equal": many(2.0),
    "all -inf": many(-INF),
    "one above -inf": many(-INF, _700=-3e38),
    "all NaN": many(NAN),
    "NaN above infinity": many(0.0, _3=INF, _700=NAN, _900=NAN),
    "infinities": many(0.0, _700=INF, _900=INF),
    "zeros of both signs": many(-1.0, _700=-0.0, _900=0.0),
    "zeros below": many(-0.0, _900=1.0),
    "the largest last": many(-5.0, _999=30.0),
    "too large to divide": many(-3e38, _700=3e38, _900=3e38),
}
LIMITS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1e-29},
    {"temperature": INF},
    {"temperature": NAN},
    {"top_k": 3},
    {"top_k": 1000},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.9},
    {"top_p": NAN},
    {"min_p": 0.5},
    {"min_p": 7.0},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 1e-29},
    {"mask": torch.arange(1000) % 100 == 99, "top_p": 0.9},
    {"mask": torch.arange(1000) == 998},
    {"mask": torch.zeros(1000, dtype=torch.bool)},
    {"bias_ids": torch.tensor([998]), "bias": torch.tensor([3e38])},
    {"bias_ids": torch.tensor([700, 998]), "bias": torch.tensor([-100.0, 100.0]), "min_p": 0.1},
]


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    requests = [SamplingRequest(seed=n, logprobs=20, **limits) for n, limits in enumerate(LIMITS)]
    logits = EDGES[name].repeat(len(requests), 1)
    ours, theirs = sample_requests(logits, requests), truth.sample_requests(logits, requests)
    assert_same(ours, theirs)
    for limits, token in zip(LIMITS, ours.tokens.tolist(), strict=True):
        if "mask" in limits:
            assert limits["mask"][token] if limits["mask"].any() else token == -1


def test_a_draw_is_the_requests_own() -> None:
    """Neither the row, nor the neighbours, nor what stands behind a row changes it."""
    logits = torch.randn(9, 777)
    requests = [SamplingRequest(seed=100 + r, draws=r, top_p=0.9, logprobs=2) for r in range(9)]
    together = sample_requests(logits, requests)
    for r, request in enumerate(requests):
        alone = sample_requests(logits[r : r + 1], [request])
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0].nan_to_num(), b[r].nan_to_num())
    wide = torch.full((9, 1000), NAN)
    wide[:, :777] = logits
    assert torch.equal(sample_requests(wide[:, :777], requests).tokens, together.tokens)


@kernel()
def _call(run, args, index, worker):
    return call_task(run, args, index, worker)


def test_any_order_and_workers_give_the_same_bits() -> None:
    rng = random.Random(1)
    R, V = 12, 70_001
    logits = 3 * torch.randn(R, V)
    requests = [random_request(V, rng) for _ in range(R)]
    requests = [dataclasses.replace(request, logprobs=20) for request in requests]
    expected = sample_requests(logits, requests)
    call = prepare(logits, requests, workers=3)
    for setup, run in make_ops():
        tasks = list(range(_call(setup.address, call.address, -1, 0)))
        rng.shuffle(tasks)
        assert all(_call(run.address, call.address, t, rng.randrange(3)) == 0 for t in tasks)
    for a, b in zip(expected, call.out, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_draws_follow_the_softmax() -> None:
    T, chances = 4000, torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = chances.log().repeat(T, 1)
    mine = [SamplingRequest(seed=11, draws=n, logprobs=-1) for n in range(T)]
    others = [SamplingRequest(seed=n, logprobs=-1) for n in range(T)]
    for requests in (mine, others):
        counts = sample_requests(logits, requests).tokens.bincount(minlength=5)
        chi = ((counts - T * chances) ** 2 / (T * chances)).sum()
        assert chi < 18.5  # 0.1 % of honest draws exceed it, of 4 degrees of freedom


def test_penalties_and_bias_by_hand() -> None:
    row = torch.tensor([2.0, 4.0, -4.0, 8.0, 1.0])
    request = SamplingRequest(
        repetition=2.0,
        presence=0.5,
        frequency=0.25,
        seen=torch.tensor([1, 2, 3]),
        counts=torch.tensor([0, 2, 1]),
        bias_ids=torch.tensor([1]),
        bias=torch.tensor([2.0]),
        mask=torch.tensor([True, True, True, True, False]),
    )
    expected = [2.0, 6.0 / 2, -4.0 * 2 - 0.5 - 0.5, 8.0 / 2 - 0.25 - 0.5, -INF]
    assert truth.adjusted(row, request).tolist() == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition": 0.0},
        {"logprobs": 21},
        {"mask": torch.ones(3, dtype=torch.bool)},
        {"seen": torch.zeros(2)},
    ],
)
def test_requests_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PykernelsError):
        sample_requests(torch.zeros(1, 8), [SamplingRequest(**wrong)])


def test_inputs_that_cannot_be() -> None:
    for logits, requests in (
        (torch.zeros(1, 8).bfloat16(), [SamplingRequest()]),
        (torch.zeros(2, 8), [SamplingRequest()]),
    ):
        with pytest.raises(PykernelsError):
            sample_requests(logits, requests)
    with pytest.raises(PykernelsError):
        sizes(1, 1 << 24, 1)


def test_inputs_as_arrays() -> None:
    rng = random.Random(3)
    requests = [random_request(257, rng) for _ in range(8)]
    logits = torch.randn(8, 257, generator=torch.Generator().manual_seed(3))
    assert_same(sample(logits, inputs_of(requests, 257)), sample_requests(logits, requests))
    with pytest.raises(PykernelsError, match="logits are torch.int64"):
        sample(logits.long(), inputs_of(requests, 257))
