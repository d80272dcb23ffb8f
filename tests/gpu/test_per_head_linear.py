"""A matrix for each head, against float64."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.per_head_linear import PerHeadPlan, per_head_linear
from pykernels.testing import relative_error

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("T", "G", "K", "N"),
    [
        (1, 3, 32, 80),
        (5, 2, 48, 20),
        (70, 1, 100, 40),
        (0, 2, 16, 16),
        *[
            pytest.param(T, 128, K, 640 - K, marks=pytest.mark.gpu)
            for T in (1, 16, 64, 1000)
            for K in (128, 512)
        ],
    ],
)
def test_products(T: int, G: int, K: int, N: int, device: torch.device) -> None:
    """Slices of wider heads, in and out; what lies beside the results stays."""
    x = torch.randn(T, G, K + 16, device=device).to(BF16)[..., 16:]
    weight = torch.randn(G, N, K, device=device).to(BF16)
    whole = torch.full((T, G, N + 8), torch.nan, dtype=BF16, device=device)
    found = per_head_linear(x, weight, whole[..., :N])
    truth = torch.stack([x[:, g].double() @ weight[g].double().T for g in range(G)], 1)
    assert T == 0 or relative_error(found.cpu(), truth.cpu()) < 4e-3  # of one rounding to bf16
    assert T == 0 or relative_error(ref.per_head_linear(x, weight).cpu(), truth.cpu()) < 1e-5
    assert whole[..., N:].isnan().all()


def test_floats_by_a_plan(device: torch.device) -> None:
    x = torch.randn(20, 2, 40, device=device).to(BF16).float()
    weight = torch.randn(2, 33, 40, device=device).to(BF16)
    found = per_head_linear(x, weight, plan=PerHeadPlan(16, 16, 32, 4, 2))
    assert found.dtype == torch.float32
    assert relative_error(found.cpu(), ref.per_head_linear(x, weight).cpu()) < 1e-5


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(2, 3, 8, device=device), torch.zeros(3, 4, 8, device=device).to(BF16)
    for wrong in (
        (x[:, :2], weight),
        (x, weight.float()),
        (x, weight[..., :7].contiguous()),
        (x, weight.transpose(1, 2)),
        (x, weight, torch.zeros(2, 3, 5, device=device)),
    ):
        with pytest.raises(PykernelsError):
            per_head_linear(*wrong)


def _compile(T: int, K: int, N: int) -> None:
    x, weight = (torch.empty(*s, K, dtype=BF16, device="meta") for s in ((T, 128), (128, N)))
    per_head_linear(x, weight)


COMPILES = [("W_UK, one token", lambda: _compile(1, 128, 512))]
COMPILES_ON_A_GPU = [
    ("W_UV, one token", lambda: _compile(1, 512, 128)),
    ("W_UV, 64 tokens", lambda: _compile(64, 512, 128)),
    ("W_UK, 1000 tokens", lambda: _compile(1000, 128, 512)),
]
