"""Sampling in plain torch: Philox's numbers, Gumbel's trick, and which tokens may be drawn.

A draw is ``argmax(where(kept(...), perturbed(...), -inf))``. Logarithms and sums over the
vocabulary are in float64, so that the GPU, which does the same, draws the very same tokens. NaN is
above all logits, as in torch.topk: a row that has one draws its first, whatever the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

COLDEST = 2.0**-100
"""Temperatures below are greedy, as 0 is: logits divided by them would be infinite."""
HOTTEST = 2.0**100
"""Temperatures above count as this: -inf divided by infinity would be NaN, above all logits."""
PHILOX_ROUNDS = 10
PHILOX_KEYS = 0x9E3779B9, 0xBB67AE85
PHILOX_FACTORS = 0xD2511F53, 0xCD9E8D57
_LOW = 0xFFFFFFFF


def philox(seed: int, *counters: torch.Tensor) -> torch.Tensor:
    """First output of Philox4x32-10 (Salmon et al., SC 2011) for a 64-bit key.

    Args:
        seed: the key.
        counters: four int64 tensors of 32-bit words that broadcast together.

    Returns:
        int64 in ``0 .. 2**32 - 1``.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counters)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _product(c0, PHILOX_FACTORS[0])
        high1, low1 = _product(c2, PHILOX_FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_KEYS[0]) & _LOW, (k1 + PHILOX_KEYS[1]) & _LOW
    return c0


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit words, without leaving int64."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)  # below 2**48 each
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def perturbed(
    logits: torch.Tensor,
    state: torch.Tensor,
    temperature: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``logits / temperature`` plus Gumbel noise: its argmax is a draw from their softmax.

    Rows colder than ``COLDEST`` stay as they are: their argmax is the greedy choice.

    Args:
        logits: [T, V].
        state: int64 [2], seed and step; token v of row t draws Philox's word (v, t, step).
        temperature: [T].
        dtype: of the arithmetic and of the result.

    Returns:
        [T, V] in ``dtype``.
    """
    T, V = logits.shape
    seed, step = state.tolist()
    v, t = (torch.arange(n, dtype=torch.int64, device="cpu") for n in (V, T))
    low, high = (v.new_tensor(step >> shift & _LOW) for shift in (0, 32))
    words = philox(seed, v, t.unsqueeze(1), low, high)
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23  # exact in float32, never 0 or 1
    noise = -(-uniform.log()).log()
    heat = temperature.to(dtype).clamp(max=HOTTEST).unsqueeze(1)
    noisy = logits.to(dtype) / heat + noise.to(logits.device, dtype)
    return torch.where(heat >= COLDEST, noisy, logits)


def kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which tokens may be drawn: bool [T, V].

    Those at least as large as the ``top_k``-th largest, and at least ``min_p`` times as likely as
    the likeliest; of these, those with less than ``top_p`` of the softmax's mass strictly above
    them. Equal logits share their fate; the largest always stays, and NaN, which counts as
    infinity.

    Args:
        logits: [T, V].
        temperature: [T]; below ``COLDEST`` it counts as 1.
        top_k: int [T]; 0 or less, or more than V: all.
        top_p: [T]; 1 or more: all; NaN: the largest, as 0.
        min_p: [T]; 0 or less, or NaN: all; above 1 it counts as 1.
    """
    T, V = logits.shape
    logits = logits.to(dtype)
    logits = logits.masked_fill(logits.isnan(), torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True)
    stay = torch.ones(T, V, dtype=torch.bool, device=logits.device)
    if top_k is not None:
        k = torch.where((top_k < 1) | (top_k > V), V, top_k).long().unsqueeze(1)
        stay = ordered >= ordered.gather(1, k - 1)
    heat = torch.where(temperature >= COLDEST, temperature, 1).clamp(max=HOTTEST)
    heat = heat.to(dtype).unsqueeze(1)
    if min_p is not None:
        p = min_p.to(dtype).unsqueeze(1)
        least = ordered[:, :1] / heat + p.clamp(max=1).double().log().to(dtype)
        stay = stay & ((ordered / heat >= least) | ~(p > 0))
    if top_p is not None:
        mass = (ordered / heat).masked_fill(~stay, -torch.inf).double().softmax(-1)
        first = torch.searchsorted(-ordered, -ordered)  # of its equals: how many are larger
        above = (mass.cumsum(-1) - mass).gather(1, first)
        p = top_p.to(dtype).unsqueeze(1)
        stay = stay & ((above < p) | (p >= 1) | (first == 0))
    return torch.zeros_like(stay).scatter(1, order, stay)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row (NaN, if it has one), int64 [T]; of equal ones the lowest index."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., 0]


MAX_LOGPROBS = 20
"""Top logprobs of a token at most, as in OpenAI's API."""


@dataclass(frozen=True, eq=False)
class SamplingRequest:
    """How the next token of one request is drawn.

    Applied in this order, which is vLLM's: mask, logit bias, penalties, temperature, top-k, min-p,
    top-p.

    Attributes:
        temperature: below ``COLDEST`` (0, say) the largest is taken, of equal ones the lowest id.
        top_k, top_p, min_p: limits, as in `kept`.
        repetition: positive; logits of ``seen`` tokens are divided by it, negative ones multiplied.
        presence: taken from the logits of tokens that are in the output.
        frequency: the same, times how often they are in it.
        seen: int32 [n], distinct ids of the tokens in prompt or output; None: none.
        counts: int32 [n], how often each is in the output; 0: only in the prompt.
        bias_ids, bias: int32 and float32 [b], distinct ids and what is added to their logits.
        mask: bool [V], the tokens that may be drawn; None: all.
        seed: int64, the key of Philox.
        draws: int64, tokens drawn before this one. Token v draws Philox's word (v, 0, draws),
            whatever the row and its neighbours.
        logprobs: top logprobs wanted, 0 .. ``MAX_LOGPROBS``; -1: not the token's own either.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    seed: int = 0
    draws: int = 0
    logprobs: int = 0


class Sampled(NamedTuple):
    """What `sample_requests` returns.

    Logprobs are of the softmax of the logits as they came, which is what OpenAI's API reports:
    before bias, penalties and temperature. Those of a row with NaN or without a finite largest
    logit are NaN, without top ids.

    Attributes:
        tokens: int64 [R]; -1 where the mask allows none.
        logprobs: float32 [R], of the tokens; NaN where not wanted.
        top_ids: int64 [R, MAX_LOGPROBS], likeliest first, of equals the lowest; then -1.
        top_logprobs: float32, likewise; then NaN.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def adjusted(logits: torch.Tensor, request: SamplingRequest) -> torch.Tensor:
    """Logits [V] of one row after mask, bias and penalties; what the mask forbids is -inf."""
    logits = logits.clone()
    if request.mask is not None:
        logits[~request.mask] = -torch.inf
    if request.bias_ids is not None and request.bias is not None:
        logits[request.bias_ids.long()] += request.bias.to(logits.dtype)
    if request.seen is not None and request.counts is not None:
        seen, counts = request.seen.long(), request.counts.to(logits.dtype)
        x = logits[seen]
        x = torch.where(x > 0, x / request.repetition, x * request.repetition)
        x = x - request.frequency * counts
        logits[seen] = x - request.presence * (counts > 0)
    return logits


def sample_requests(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> Sampled:
    """One token a row, of requests that know nothing of each other.

    Args:
        logits: float32 [R, V].
        requests: R of them.
    """
    R = logits.shape[0]
    tokens, own = logits.new_full((R,), -1, dtype=torch.int64), logits.new_full((R,), torch.nan)
    ids = tokens.unsqueeze(1).repeat(1, MAX_LOGPROBS)
    tops = own.unsqueeze(1).repeat(1, MAX_LOGPROBS)
    for r, (row, request) in enumerate(zip(logits, requests, strict=True)):
        token = tokens[r] = _draw(adjusted(row, request), request)
        if request.logprobs < 0 or token < 0 or not row.amax().isfinite():
            continue
        # In float32, torch's sum over a large vocabulary is off by 2e-5.
        order = row.double().log_softmax(-1).sort(descending=True, stable=True)
        own[r] = order.values[order.indices == token].squeeze()
        n = min(request.logprobs, row.shape[0])
        ids[r, :n], tops[r, :n] = order.indices[:n], order.values[:n]
    return Sampled(tokens, own, ids, tops)


def _draw(logits: torch.Tensor, request: SamplingRequest) -> int:
    mask = request.mask
    allowed = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    if not allowed.any():
        return -1
    finite = allowed & (logits != -torch.inf)  # NaN too
    temperature, top_p, min_p = (
        logits.new_tensor([x]) for x in (request.temperature, request.top_p, request.min_p)
    )
    state = torch.tensor([request.seed, request.draws], dtype=torch.int64, device="cpu")
    top_k = torch.tensor([request.top_k], dtype=torch.int64, device=logits.device)
    row = logits.unsqueeze(0)
    stay = kept(row, temperature, top_k, top_p, min_p=min_p)[0]
    stay = stay & (finite if finite.any() else allowed)
    noisy = perturbed(row, state, temperature)[0].clamp_min(torch.finfo(logits.dtype).min)
    return int(noisy.masked_fill(~stay, -torch.inf).argmax())
