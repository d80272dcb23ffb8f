"""Activations to E4M3: the reference's codes and scales, in the experts' order too."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.gpu.moe.permute import permute, sort_pairs
from pykernels.gpu.quantize import quantize_fp8
from pykernels.ref.linear import dequantize_fp8
from pykernels.ref.linear import quantize_fp8 as quantize_reference
from pykernels.testing import relative_error


@pytest.mark.parametrize("K", [128, 320], ids=["whole groups", "a ragged last group"])
def test_activations_quantize_as_the_reference_does(K: int, device: torch.device) -> None:
    x = torch.randn(21, K) * torch.logspace(-4, 3, 21)[:, None]
    x[3], x[4, :128] = 0, 0
    x[5, 0] = 1e30  # everything else of its group becomes 0
    codes, scales = quantize_fp8(x.bfloat16().to(device))
    expected, expected_scales = quantize_reference(x.bfloat16())
    assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-6)
    # A quotient that is rounded otherwise moves a code now and then.
    moved = codes.cpu().view(torch.uint8) != expected.view(torch.uint8)
    assert moved.float().mean() < 2e-3
    error = relative_error(dequantize_fp8(codes.cpu(), scales.cpu()), x.bfloat16())
    assert error <= 1.01 * relative_error(dequantize_fp8(expected, expected_scales), x.bfloat16())


def test_what_is_no_number_has_no_part_in_a_scale(device: torch.device) -> None:
    x = torch.randn(3, 256).bfloat16()
    x[0, 5], x[1, :128] = torch.nan, torch.nan
    codes, scales = quantize_fp8(x.to(device))
    expected, expected_scales = quantize_reference(x)
    assert torch.equal(codes.cpu().float().isnan(), x.isnan())
    assert torch.equal(expected.float().isnan(), x.isnan())
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
    assert scales[1, 0] == 1


def test_a_group_too_small_for_a_scale_has_the_scale_one(device: torch.device) -> None:
    """A 448th of its largest is no float32 any more but 0, and nothing divided by 0 is a number."""
    x = torch.zeros(2, 256)
    x[0, 3], x[1, 130] = 1e-43, -1e-40
    (codes, scales), expected = quantize_fp8(x.to(device)), quantize_reference(x)
    assert torch.equal(codes.cpu().float(), expected[0].float())
    assert torch.equal(scales.cpu(), expected[1]) and scales[0].eq(1).all()
    assert 0 < scales[1, 1] < 1e-42 and codes[1].float().isfinite().all()


def test_activations_quantize_into_the_experts_order(device: torch.device) -> None:
    x = torch.randn(21, 192).bfloat16()
    ids = torch.randint(5, (21, 2))
    ids[3], ids[7, 1] = -1, 5
    order = sort_pairs(ids.to(device), 5)
    codes, scales = quantize_fp8(x.to(device))
    found, found_scales = quantize_fp8(x.to(device), order)
    assert torch.equal(found.view(torch.uint8), permute(codes, order).view(torch.uint8))
    assert torch.equal(found_scales, permute(scales, order))
    truth, _ = ref.quantize_fp8(x, ref.sort_pairs(ids, 5))
    assert (found.cpu().view(torch.uint8) != truth.view(torch.uint8)).float().mean() < 2e-3
