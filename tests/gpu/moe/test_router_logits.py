"""The router's logits: as near float64 as float32's own product, from bf16 inputs too."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.moe.router_logits import GatePlan, router_logits
from pykernels.testing import assert_close, relative_error

BF16, FP32 = torch.bfloat16, torch.float32

# T, E, H, why
SIZES = [
    (0, 8, 64, "no tokens"),
    (1, 7, 100, "odd sizes, rows in registers"),
    (8, 16, 512, "the most that rows in registers take"),
    (3, 5, 2500, "padded rows, blocks of H, the last ragged"),
    (9, 16, 520, "tiles, splits of H, the last ragged"),
    (40, 33, 300, "ragged everywhere"),
    (2, 2100, 70, "a head of few tokens"),
    pytest.param(1, 256, 7168, "DeepSeek-V3, a token", marks=pytest.mark.gpu),
    pytest.param(8, 256, 7168, "DeepSeek-V3, several blocks of H", marks=pytest.mark.gpu),
    pytest.param(64, 256, 7168, "DeepSeek-V3, a batch", marks=pytest.mark.gpu),
    pytest.param(4096, 256, 7168, "DeepSeek-V3, a prompt", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("x_dtype", "gate_dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
@pytest.mark.parametrize(("T", "E", "H", "why"), SIZES)
def test_router_logits(
    T: int,
    E: int,
    H: int,
    why: str,
    x_dtype: torch.dtype,
    gate_dtype: torch.dtype,
    device: torch.device,
) -> None:
    hidden = torch.randn(T, H + 8, device=device).to(x_dtype)[:, :H]
    gate = (torch.randn(E, H, device=device) / H**0.5).to(gate_dtype)
    out = torch.full((T, E), torch.nan, device=device)
    assert router_logits(hidden, gate, out) is out
    truth = ref.router_logits(hidden, gate, torch.float64)
    native = relative_error(ref.router_logits(hidden, gate), truth) if T else 0.0
    # The sums of H products come in blocks: of the order of float32's own errors, whose bound is
    # eps * sqrt(H) for random ones; a cut in every tensor core instruction would be eps * H / 32.
    assert_close(out, truth, max(4 * native, 2e-6))
    assert torch.equal(out, router_logits(hidden, gate))


def test_splits_change_only_the_order_of_the_sums(device: torch.device) -> None:
    hidden, gate = torch.randn(20, 512).to(device, BF16), torch.randn(16, 512).to(device, BF16)
    truth = ref.router_logits(hidden, gate, torch.float64)
    for splits in (1, 2, 3):
        plan = GatePlan(16, 16, 64, splits, 4, 3)
        assert_close(router_logits(hidden, gate, None, plan), truth, 2e-6)


def _compile(T: int, gate_dtype: torch.dtype) -> None:
    meta = torch.device("meta")
    hidden = torch.empty(T, 7168, dtype=BF16, device=meta)
    router_logits(hidden, torch.empty(256, 7168, dtype=gate_dtype, device=meta))


COMPILES = [
    ("1 token, float32 gate", lambda: _compile(1, FP32)),
    ("64 tokens, float32 gate", lambda: _compile(64, FP32)),
    ("8192 tokens, bf16 gate", lambda: _compile(8192, BF16)),
]
COMPILES_ON_A_GPU = [
    ("2 tokens, float32 gate", lambda: _compile(2, FP32)),
    ("8 tokens, bf16 gate", lambda: _compile(8, BF16)),
    ("9 tokens, float32 gate", lambda: _compile(9, FP32)),
    ("512 tokens, bf16 gate", lambda: _compile(512, BF16)),
    ("8192 tokens, float32 gate", lambda: _compile(8192, FP32)),
]
