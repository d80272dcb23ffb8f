"""Rotary embedding: which pairs are turned which way; YaRN's figures."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.rope import rope_frequencies, yarn_frequencies, yarn_scale


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_multiplied_as_complex_numbers(interleaved: bool, device: torch.device) -> None:
    """Which way they are rotated, and that the scale is of the rotated part alone."""
    x, positions = torch.randn(5, 3, 12, device=device), torch.tensor([0, 1, 2, 7, 30]).to(device)
    frequencies = rope_frequencies(8).to(device)
    angles = positions[:, None, None] * frequencies
    if interleaved:
        pairs = torch.complex(x[..., 0:8:2], x[..., 1:8:2])
    else:
        pairs = torch.complex(x[..., 0:4], x[..., 4:8])
    pairs = pairs * torch.polar(torch.full_like(angles, 1.5), angles)
    parts = [pairs.real, pairs.imag]
    rotated = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    truth = torch.cat([rotated, x[..., 8:]], -1)
    definition, _ = ref.rope(x, None, positions, frequencies, interleaved, 1.5)
    torch.testing.assert_close(definition, truth)


@pytest.mark.parametrize(
    ("dim", "base", "factor", "mscale", "all_dim", "truncate", "original"),
    [
        (64, 10000.0, 40.0, 1.0, 1.0, True, 4096),
        (64, 50000.0, 32.0, 1.0, 1.0, True, 4096),
        (128, 1e6, 4.0, 0.707, 0.9, True, 4096),
        (64, 150000.0, 32.0, 1.0, 0.0, False, 4096),
        (64, 20.0, 4.0, 1.0, 1.0, True, 4096),
        (64, 10000.0, 4.0, 1.0, 1.0, True, 128),
    ],
    ids=["deepseek v3", "kimi k2", "others", "gpt-oss", "a ramp to the end", "from the start"],
)
def test_yarn_is_what_transformers_makes(
    dim: int,
    base: float,
    factor: float,
    mscale: float,
    all_dim: float,
    truncate: bool,
    original: int,
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=dim * 2,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=original * int(factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": mscale,
            "mscale_all_dim": all_dim,
            "original_max_position_embeddings": original,
            "truncate": truncate,
        },
    )
    theirs, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    mine = yarn_frequencies(dim, base, factor, original, truncate=truncate)
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=0)
    assert yarn_scale(factor, mscale) / yarn_scale(factor, all_dim) == pytest.approx(scale)
    assert yarn_scale(1.0) == 1.0
