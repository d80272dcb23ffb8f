"""The cases of moe and linear, tiny and interpreted: they run, and count what they should."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import linear, moe
from bench.gpu.weights import random_experts, random_stack
from pykernels.errors import PykernelsError
from pykernels.testing import relative_error

CPU = torch.device("cpu")
FORMATS = ("bf16", "fp8", "int8", "int4", "int4-g128", "q4_k", "q6_k")


@pytest.mark.parametrize("format", (*FORMATS, "int8-channel"))
def test_random_matrices_give_results_of_a_models_size(format: str) -> None:
    found = linear.case(CPU, format, 2, 256, 32).run()
    assert isinstance(found, torch.Tensor) and 0.05 < float(found.float().std()) < 20


def test_a_linear_reads_its_weights_and_scales_once() -> None:
    found = linear.case(CPU, "int4", 3, 256, 32)
    assert found.nbytes == 32 * 256 // 2 + 32 * 256 // 32 * 2 + 3 * 256 * 2 + 3 * 32 * 2
    assert found.flops == 2 * 3 * 256 * 32


@pytest.mark.parametrize("format", ["bf16", "fp8", "q4_k"])
def test_a_layer_runs_and_reads_the_experts_that_it_touches(format: str) -> None:
    one = moe.case(CPU, format, 1, 256, 256, 8, 2)
    result = one.run()
    assert isinstance(result, torch.Tensor) and result.shape == (1, 256)
    assert result.isfinite().all()
    experts = random_experts(format, 8, 256, 256, CPU)
    each = 2 * experts.gate_up.nbytes + experts.down.nbytes
    assert one.nbytes == 2 * each + 4 * 256
    assert one.flops == 2 * 6 * 256 * 256


def test_torchs_grouped_products_compute_the_same() -> None:
    layer = moe.case(CPU, "bf16", 6, 128, 64, 4, 2)
    ours, theirs = layer.run(), layer.peers["torch_grouped_mm"]()
    assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
    assert relative_error(ours, theirs) < 2e-2


def test_torchs_parts_compute_the_same() -> None:
    experts = random_experts("bf16", 4, 128, 64, CPU)
    for case in moe.product_cases(experts, "bf16", 6, 2, "bf16"):
        ours, theirs = case.run(), case.peers["torch_grouped_mm"]()
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert relative_error(ours, theirs) < 2e-2


@pytest.mark.parametrize("routing", moe.ROUTINGS)
def test_routings_give_a_token_distinct_experts(routing: str) -> None:
    ids = moe.route(32, 8, 3, routing, CPU)
    assert ids.shape == (32, 3) and all(len(set(row)) == 3 for row in ids.tolist())
    if routing == "balanced":
        assert ids.flatten().bincount(minlength=8).tolist() == [12] * 8


def test_products_alone_are_counted_as_parts_of_the_layer() -> None:
    experts = random_experts("fp8", 4, 128, 128, CPU)
    names = {}
    for case in moe.product_cases(experts, "fp8", 8, 2, "fp8"):
        case.run()
        names[case.name] = case
    assert set(names) == {"gate_up", "down", "quantize_fp8 sorted"}
    assert names["gate_up"].flops == 2 * names["down"].flops == 4 * 16 * 128 * 128
    assert names["down"].compute == "fp8"


def test_unknown_formats_and_routings_are_refused() -> None:
    with pytest.raises(PykernelsError, match="GPU layout"):
        random_stack("q5_k", 1, 8, 256, CPU)
    for case in (linear.case, moe.case):
        for activations, why in (("int8", "no 'int8' activations"), ("fp8", "int4 weights")):
            with pytest.raises(PykernelsError, match=why):
                case(CPU, "int4", activations=activations)  # before its matrices are made
    with pytest.raises(PykernelsError, match="no routing"):
        moe.route(1, 8, 2, "worst", CPU)
