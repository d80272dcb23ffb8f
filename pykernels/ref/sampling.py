"""Sampling in plain torch: Philox's numbers, Gumbel's trick, and which tokens may be drawn.

The GPU draws the very same tokens: ``argmax(where(kept(...), perturbed(...), -inf))``. NaN is above
all logits, as in torch.topk: a row that has one draws its first, whatever the limits.
"""

from __future__ import annotations

import torch

COLDEST = 2.0**-100
"""Temperatures below are greedy, as 0 is: logits divided by them would be infinite."""
HOTTEST = 2.0**100
"""Temperatures above count as this: -inf divided by infinity would be NaN, above all logits."""
_ROUNDS = 10
_KEYS = 0x9E3779B9, 0xBB67AE85
_FACTORS = 0xD2511F53, 0xCD9E8D57
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
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _FACTORS[0])
        high1, low1 = _product(c2, _FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEYS[0]) & _LOW, (k1 + _KEYS[1]) & _LOW
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
    uniform = ((words >> 9).to(dtype) + 0.5) * 2.0**-23  # exact in float32, never 0 or 1
    noise = -(-uniform.log()).log()
    heat = temperature.to(dtype).clamp(max=HOTTEST).unsqueeze(1)
    return torch.where(heat >= COLDEST, logits.to(dtype) / heat + noise.to(logits.device), logits)


def kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Which tokens may be drawn: bool [T, V].

    Those at least as large as the ``top_k``-th largest; of these, those with less than ``top_p`` of
    the softmax's mass strictly above them. Equal logits share their fate; the largest always stays,
    and NaN, which counts as infinity.

    Args:
        logits: [T, V].
        temperature: [T]; below ``COLDEST`` it counts as 1.
        top_k: int [T]; 0 or less, or more than V: all.
        top_p: [T]; 1 or more: all; NaN: the largest, as 0.
    """
    T, V = logits.shape
    logits = logits.to(dtype)
    logits = logits.masked_fill(logits.isnan(), torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True)
    stay = torch.ones(T, V, dtype=torch.bool, device=logits.device)
    if top_k is not None:
        k = torch.where((top_k < 1) | (top_k > V), V, top_k).long().unsqueeze(1)
        stay = ordered >= ordered.gather(1, k - 1)
    if top_p is not None:
        heat = torch.where(temperature >= COLDEST, temperature, 1).clamp(max=HOTTEST)
        heat = heat.to(dtype).unsqueeze(1)
        mass = (ordered / heat).masked_fill(~stay, -torch.inf).softmax(-1)
        first = torch.searchsorted(-ordered, -ordered)  # of its equals: how many are larger
        above = (mass.cumsum(-1) - mass).gather(1, first)
        p = top_p.to(dtype).unsqueeze(1)
        stay = stay & ((above < p) | (p >= 1) | (first == 0))
    return torch.zeros_like(stay).scatter(1, order, stay)


def sample(
    logits: torch.Tensor,
    state: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One token a row, int64 [T]; arguments as above."""
    stay = kept(logits, temperature, top_k, top_p, dtype)
    noisy = perturbed(logits, state, temperature, dtype)
    noisy = noisy.clamp_min(torch.finfo(noisy.dtype).min)  # what may be drawn is above what may not
    return noisy.masked_fill(~stay, -torch.inf).argmax(-1)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row (NaN, if it has one), int64 [T]; of equal ones the lowest index."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., 0]
