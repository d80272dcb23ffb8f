"""Rotary position embedding in plain torch (RoFormer, arXiv 2104.09864; YaRN, 2309.00071)."""

from __future__ import annotations

import math

import torch


def rope_frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    """``base ** (-2i / dim)``: float32 [dim / 2]."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def yarn_frequencies(
    dim: int,
    base: float,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> torch.Tensor:
    """Frequencies of a context stretched by ``factor`` (YaRN, 3.2): float32 [dim / 2].

    Those that turn more than ``beta_fast`` times in the ``original`` context stay, those that turn
    less than ``beta_slow`` times are divided by ``factor``, and between lies a ramp.

    Args:
        truncate: the ramp begins and ends at whole frequencies, as DeepSeek's does; else exactly
            where they turn so often (gpt-oss; transformers' ``rope_parameters["truncate"]``).
    """

    def index(turns: float) -> float:  # of the frequency that turns so often
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(
        high - low, 0.001
    )
    stretched = ramp.clamp(0, 1)
    plain = rope_frequencies(dim, base)
    return plain * (1 - stretched) + plain / factor * stretched


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """``0.1 mscale ln(factor) + 1`` (YaRN, 3.4), 1 for no stretch.

    DeepSeek multiplies cos and sin by ``yarn_scale(factor, mscale) / yarn_scale(factor,
    mscale_all_dim)`` and the softmax scale by ``yarn_scale(factor, mscale_all_dim) ** 2``.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    interleaved: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turns the first R = 2 * len(frequencies) of the last dimension; the others stay.

    Pairs are (i, i + R / 2), or (2i, 2i + 1) if ``interleaved``, and stay where they are.

    Args:
        q: [T, heads, D], D >= R.
        k: [T, kv heads, D'] or None.
        positions: int [T].
        frequencies: float32 [R / 2]; angles are float32 products with the positions, in any
            ``dtype``, as the models were trained.
        interleaved: which pairs.
        scale: of cos and sin (YaRN's attention factor).
        dtype: of the other arithmetic and of the results.

    Returns:
        q and k rotated, of their shapes, in ``dtype``; None for no k.
    """
    angles = (positions.float().unsqueeze(1) * frequencies.float()).to(dtype)  # [T, R / 2]
    cos, sin = (f(angles).unsqueeze(1) * scale for f in (torch.cos, torch.sin))
    R = 2 * frequencies.shape[0]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype)
        head, rest = x[..., :R], x[..., R:]
        if interleaved:
            a, b = head[..., 0::2], head[..., 1::2]
        else:
            a, b = head.chunk(2, dim=-1)
        a, b = a * cos - b * sin, a * sin + b * cos
        both = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
        return torch.cat([both, rest], -1)

    return rotated(q), None if k is None else rotated(k)
