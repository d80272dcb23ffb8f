"""The GEMMs, that of AMX on modelled tiles."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.backends import amx, avx2, avx512
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.moe.kernel import assemble, join
from pykernels.cpu.moe.plan import MoEPlan
from pykernels.cpu.weights.layout import WIDE
from pykernels.quant import FORMATS, PackedExperts, get_format
from pykernels.shapes import MoEShape, Routing
from pykernels.testing import (
    assert_close,
    balanced_routing,
    fit,
    flips,
    poisoned,
    random_experts,
    skewed_routing,
)

from ..kernels import needs_avx2, needs_avx512, operations, variant

SHAPE = MoEShape(E=4, H=640, I=160, topk=2)
"""5 scale blocks: whole slabs and a short one, but where K is padded to 256."""

CASES = [
    pytest.param(1, MoEPlan(1, 1, gemm_from=1), id="one token in a tile of 32"),
    pytest.param(7, MoEPlan(2, 3, gemm_from=1), id="few tokens, ragged chunks"),
    pytest.param(50, MoEPlan(8, 16, gemm_from=1), id="25 an expert: one pair of tiles"),
    pytest.param(
        70, MoEPlan(3, 20, gemm_from=5), id="35 an expert: two pairs; chunk over the limit"
    ),
    pytest.param(600, MoEPlan(5, 8, gemm_from=5), id="300 an expert: two passes"),
]


FLOAT32_SUMS = 1e-6

UNITS = {
    "modelled amx": needs_avx512,
    "avx512": needs_avx512,
    "fma": needs_avx512,
    "avx2": needs_avx2,
    "base": needs_avx512,
    "other": needs_avx512,
}
"""What computes the GEMM and the tiles beside it: AMX, dot products or multiply-adds. "other" meets
integers the other way: as int8 slices where this CPU would not, or not where it would."""

PARAMS = [
    variant(*values, values, id="-".join(values), marks=marks)
    for unit, marks in UNITS.items()
    for fmt in FORMATS
    for activations in ("bf16", "int8")
    if activations == "bf16" or (FORMATS[fmt].int8_kind and unit not in ("fma", "avx2", "other"))
    if unit != "fma" or fmt not in WIDE  # which "avx512" multiplies so
    for values in [(unit, fmt, activations)]
]


@pytest.fixture(scope="module", params=PARAMS)
def kernels_of(request):
    unit, fmt, activations = request.param
    if unit == "avx2":
        return assemble("avx2", fmt, activations, avx2.parts(fmt, activations, vnni=False))
    ops = operations(unit == "base")
    if unit == "modelled amx":
        return assemble("amx", fmt, activations, amx.parts(fmt, activations, ops, amx_model))
    slices = ops.int8_slices != (unit == "other")
    ops = replace(ops, fma=unit == "fma", int8_slices=slices)
    return assemble("avx512", fmt, activations, avx512.parts(fmt, activations, ops))


@functools.cache
def _experts(fmt: str, shape: MoEShape) -> PackedExperts:
    return random_experts(shape, get_format(fmt))


def _inputs(T: int, shape: MoEShape) -> torch.Tensor:
    return torch.randn(T, shape.H, generator=torch.Generator().manual_seed(T)).bfloat16()


@functools.cache
def _truth(fmt: str, activations: str, shape: MoEShape, T: int, route):
    """What every unit must compute of ``_inputs`` by the experts of ``route``; and the bound."""
    routing = route(T, shape)
    reference = functools.partial(
        ref.moe_ffn,
        _inputs(T, shape),
        routing.ids,
        routing.weights,
        _experts(fmt, shape),
        dtype=torch.float64,
        h_dtype=torch.bfloat16,
        activations=activations,
    )
    truth = reference()
    return truth, FLOAT32_SUMS + flips(reference, truth)


@pytest.mark.parametrize(("T", "cut"), CASES)
def test_the_gemm_is_the_reference(kernels_of, T, cut):
    shape = fit(SHAPE, get_format(kernels_of.fmt))
    experts, routing = _experts(kernels_of.fmt, shape), balanced_routing(T, shape)
    y = _run(kernels_of, experts, routing, _inputs(T, shape), cut)
    assert_close(y, *_truth(kernels_of.fmt, kernels_of.activations, shape, T, balanced_routing))


def test_both_paths_in_one_call(kernels_of):
    """Experts of many tokens take the GEMM, others the tiles; the plan changes no bit."""
    shape = fit(MoEShape(E=16, H=256, I=128, topk=2), get_format(kernels_of.fmt))
    experts, routing = _experts(kernels_of.fmt, shape), skewed_routing(40, shape)
    counts = routing.ids.flatten().bincount(minlength=16)
    assert (counts >= 5).any() and ((counts > 0) & (counts < 5)).any()
    x = _inputs(40, shape)
    runs = [
        _run(kernels_of, experts, routing, x, MoEPlan(i, h)) for i, h in ((1, 1), (3, 5), (9, 20))
    ]
    assert_close(
        runs[0], *_truth(kernels_of.fmt, kernels_of.activations, shape, 40, skewed_routing)
    )
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def _run(routines, experts, routing, x, cut):
    call = cpu.MoECall(experts, join(routines), cpu.MoEWorkspace(), moe_plan=cut)
    return cpu.run_serially(call, x, routing.ids, routing.weights, poisoned(*x.shape))


@pytest.mark.parametrize("T", [3, 50])
def test_nothing_is_read_that_a_call_has_not_written(kernels_of, T):
    """All bits of buffers and scratch set: NaN of any float, a place that is none."""
    shape = fit(SHAPE, get_format(kernels_of.fmt))
    experts, routing = _experts(kernels_of.fmt, shape), balanced_routing(T, shape)
    x = _inputs(T, shape)
    workspace, cut = cpu.MoEWorkspace(), MoEPlan(3, 5, gemm_from=1)
    call = cpu.MoECall(experts, join(kernels_of), workspace, moe_plan=cut)

    def run() -> torch.Tensor:
        return cpu.run_serially(call, x, routing.ids, routing.weights, poisoned(*x.shape))

    clean = run()
    scratch = workspace.scratch(1, kernels_of.scratch_bytes)
    for buffer in (scratch, *workspace.buffers.values()):
        buffer.view(torch.uint8).fill_(255)
    assert clean.isfinite().all() and torch.equal(run(), clean)


def test_a_token_does_not_depend_on_its_batch(kernels_of):
    shape = fit(SHAPE, get_format(kernels_of.fmt))
    experts, routing = _experts(kernels_of.fmt, shape), balanced_routing(40, shape)
    x = _inputs(40, shape)
    cut = MoEPlan(4, 4, gemm_from=1)
    whole = _run(kernels_of, experts, routing, x, cut)
    for t in (0, 17, 38, 39):
        one = slice(t, t + 1)
        alone = Routing(routing.ids[one], routing.weights[one])
        assert torch.equal(_run(kernels_of, experts, alone, x[one], cut), whole[one])


@needs_avx512
def test_the_padding_of_h_is_summed_whatever_was_there_before():
    """Sums for a magic number are of 32 inputs: the last of a padded row hold no block of h.

    (Where integers meet int8 slices, a group of 128 always ends in a block.)
    """
    ops = replace(operations(), int8_slices=False)
    made = assemble("avx512", "int4", "bf16", avx512.parts("int4", "bf16", ops))
    workspace = cpu.MoEWorkspace()
    wide, narrow = MoEShape(E=2, H=128, I=384, topk=1), MoEShape(E=2, H=128, I=72, topk=1)
    for shape, T in ((wide, 8), (narrow, 4)):
        experts, routing = _experts("int4", shape), balanced_routing(T, shape)
        call = cpu.MoECall(experts, join(made), workspace)
        x = _inputs(T, shape) if shape is narrow else poisoned(T, shape.H, dtype=torch.bfloat16)
        y = cpu.run_serially(call, x, routing.ids, routing.weights, poisoned(T, shape.H))
    assert_close(y, *_truth("int4", "bf16", narrow, 4, balanced_routing))
