"""Sampling: the very tokens that the definition draws; the definition's own statistics."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.sampling import count_tokens, greedy, sample
from pykernels.ref.sampling import Sampled, SamplingRequest, kept, perturbed, philox
from pykernels.ref.sampling.inputs import SamplingInputs, inputs_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INF, NAN = math.inf, math.nan


def assert_same(found: Sampled, expected: Sampled) -> None:
    found = Sampled(*(x.cpu() for x in found))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.top_ids, expected.top_ids)
    for name in ("logprobs", "top_logprobs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=3e-6, equal_nan=True)


def drawn(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> list[int]:
    """The tokens, which are those of the definition, and their logprobs too."""
    inputs = inputs_of(requests, logits.shape[1])
    expected = ref.sample(logits.cpu(), inputs)
    found = sample(logits, moved(inputs, logits.device))
    assert_same(found, expected)
    return found.tokens.tolist()


def moved(inputs: SamplingInputs, device: torch.device) -> SamplingInputs:
    return SamplingInputs(**{k: x if x is None else x.to(device) for k, x in vars(inputs).items()})


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


def random_request(V: int, rng: random.Random) -> SamplingRequest:
    """Any parameters, each as its default about half of the time."""

    def some(default: Any, *values: Any) -> Any:
        return default if rng.random() < 0.5 else rng.choice(values)

    g = torch.Generator().manual_seed(rng.getrandbits(32))
    seen = torch.randperm(V, generator=g)[: rng.randrange(V + 1)].sort().values.int()
    counts = torch.randint(0, 4, (len(seen),), generator=g, dtype=torch.int32)
    bias_ids = torch.randperm(V, generator=g)[: rng.randrange(min(V, 9) + 1)].int()
    bias = 10 * torch.randn(len(bias_ids), generator=g)
    mask = torch.rand(V, generator=g) < rng.choice((0.02, 0.5, 0.98))
    penalties, biased = rng.random() < 0.4, rng.random() < 0.4
    return SamplingRequest(
        temperature=some(1.0, 0.0, 0.3, 0.8, 2.5, NAN, 1e-31),
        top_k=some(0, 1, 2, 40, 3000, V - 1, V, V + 1, -1),
        top_p=some(1.0, 0.0, 0.1, 0.5, 0.9, 0.999, 1.5, NAN),
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


@pytest.mark.parametrize(
    ("V", "R"), [(1, 6), (9, 12), (2100, 16), pytest.param(163_840, 24, marks=pytest.mark.gpu)]
)
def test_the_tokens_of_the_definition(V: int, R: int, device: torch.device) -> None:
    rng = random.Random(V)
    for turn, dtype in enumerate(DTYPES):
        logits = (torch.randn(R, V + 3) * (0.5 + 2 * turn)).to(device, dtype)[:, :V]
        drawn(logits, [random_request(V, rng) for _ in range(R)])


def test_a_row_knows_nothing_of_its_neighbours(device: torch.device) -> None:
    rng = random.Random(3)
    logits = torch.randn(5, 700, device=device) * 2
    requests = [replace(random_request(700, rng), temperature=1.0) for _ in range(5)]
    together = drawn(logits, requests)
    alone = [drawn(logits[r : r + 1], requests[r : r + 1])[0] for r in range(5)]
    assert together == alone
    assert drawn(logits[[4, 0, 2]], [requests[r] for r in (4, 0, 2)]) == [
        together[r] for r in (4, 0, 2)
    ]


def test_equal_logits_share_their_fate_and_masked_ones_are_out(device: torch.device) -> None:
    logits = torch.full((40, 64), -INF, device=device)
    logits[:, 10:14] = 2.0
    logits[:, 20:30] = 1.0
    found = drawn(logits, [SamplingRequest(top_k=5, seed=r) for r in range(40)])
    assert set(found) <= {*range(10, 14), *range(20, 30)} and len(set(found)) > 6
    logits = torch.full((40, 8), -1.0, device=device)
    logits[:, 2], logits[:, 5] = 0.0, -0.0  # equal too
    assert set(drawn(logits, [SamplingRequest(top_k=1, seed=r) for r in range(40)])) == {2, 5}


def test_the_first_nan_is_drawn_whatever_the_limits(device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    logits[0, [200, 7]] = NAN
    logits[1, 9] = -torch.tensor(NAN)  # its sign means nothing
    logits[2, [3, 8]] = torch.tensor([INF, NAN], device=device)
    logits[3] = NAN
    for request in (
        SamplingRequest(0.8, 50, 0.9),
        SamplingRequest(0.0),
        SamplingRequest(1.0, min_p=0.5, logprobs=3),
    ):
        assert drawn(logits, [request] * 4) == [7, 9, 8, 0]


def test_a_flat_nucleus_takes_several_rounds(device: torch.device) -> None:
    """With p = 0.01 of 300 nearly equal logits almost every candidate is refused."""
    logits = torch.linspace(0, 1e-3, 300, device=device).expand(5, -1).contiguous()
    assert min(drawn(logits, [SamplingRequest(top_p=0.01, seed=r) for r in range(5)])) >= 296


@pytest.mark.parametrize("least", [1e38, -3e38])
def test_logits_that_overflow_leave_the_nucleus_its_largest(
    least: float, device: torch.device
) -> None:
    logits = torch.linspace(least, least + 2e38, 300, device=device).expand(4, -1).contiguous()
    found = drawn(logits, [SamplingRequest(0.1, top_p=0.9, seed=r) for r in range(4)])
    assert found == greedy(logits).tolist()


def test_a_mask_and_bias_that_leave_nothing_or_infinities(device: torch.device) -> None:
    V = 70
    none, last = torch.zeros(V, dtype=torch.bool), torch.arange(V) == V - 1
    lost = torch.full((V,), -INF)
    lost[V - 1] = NAN
    logits = torch.stack([torch.randn(V), torch.full((V,), -INF), lost, torch.randn(V)]).to(device)
    ids, bias = torch.tensor([V - 1, 3], dtype=torch.int32), torch.tensor([INF, -INF])
    requests = [SamplingRequest(mask=mask) for mask in (none, last, ~last)]
    requests.append(SamplingRequest(bias_ids=ids, bias=bias))
    assert drawn(logits, requests) == [-1, V - 1, 0, V - 1]


def test_drawn_tokens_are_counted(device: torch.device) -> None:
    seen = torch.zeros(3, 8, dtype=torch.int32, device=device)
    seen[1, 5] = 1  # in the prompt
    rows = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    for _ in range(2):
        count_tokens(torch.tensor([5, 6, 7, -1], device=device), rows, seen)
    assert seen.nonzero().tolist() == [[0, 7], [1, 5]]
    assert seen[0, 7] == 4 and seen[1, 5] == 5
    request = SamplingInputs(**vars(inputs_of([SamplingRequest()], 8))).request(0, 8)
    assert request.seen is None


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"top_k": torch.zeros(2)}, "top_k is torch.float32"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, r"seed is torch.int64 \(3,\)"),
        ({"mask": None}, "there is no mask"),
        ({"seen": torch.zeros(1, 7, dtype=torch.int32)}, "seen is"),
    ],
)
def test_inputs_that_do_not_fit(change: dict[str, Any], cause: str, device: torch.device) -> None:
    one = torch.tensor([1], dtype=torch.int32)
    request = SamplingRequest(mask=torch.ones(8).bool(), seen=one, counts=one)
    inputs = moved(replace(inputs_of([request] * 2, 8), **change), device)
    with pytest.raises(PykernelsError, match=cause):
        sample(torch.zeros(2, 8, device=device), inputs)


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
    one = torch.tensor([1], dtype=torch.int32)
    mask = torch.ones(V, dtype=torch.bool)
    request = SamplingRequest(
        1.0, 5, 0.9, 0.1, seen=one, counts=one, bias_ids=one, bias=one, mask=mask
    )
    meta = torch.device("meta")
    sample(torch.empty(4, V, device=meta, dtype=dtype), moved(inputs_of([request] * 4, V), meta))


COMPILES = [
    ("greedy", lambda: greedy(torch.empty(4, 163_840, device="meta", dtype=torch.bfloat16))),
    ("sample", lambda: _compile(129_280)),
]
COMPILES_ON_A_GPU = [("sample, bfloat16", lambda: _compile(163_840, torch.bfloat16))]
