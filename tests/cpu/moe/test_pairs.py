"""Experts whose down is in another format than gate and up, and those with biases and a clamped
activation: every backend against the reference."""

from __future__ import annotations

import functools

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.backends import amx
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.moe.kernel import MoEKernel, assemble, join, kernel_of
from pykernels.cpu.moe.plan import MoEPlan
from pykernels.errors import PykernelsError
from pykernels.quant import Biases, PackedExperts, Weight, get_format
from pykernels.quant.split import SplitExperts
from pykernels.registry import names
from pykernels.shapes import ExpertSpec, MoEShape
from pykernels.testing import assert_close, flips, poisoned, random_experts, skewed_routing
from runtime.devices.cpu.routed import CpuExperts
from runtime.workers.pool import WorkerPool

from ..kernels import needs_vnni, only_with_all, operations, tried

FLOAT32_SUMS = 1e-6
SHAPE = MoEShape(E=6, H=256, I=512, topk=2)
GPT_OSS = MoEShape(E=6, H=200, I=72, topk=2, spec=ExpertSpec(1.702, 7.0, 1.0, bias=True))
CASES = {
    "q4_k + q6_k": (SHAPE, "q4_k", "q6_k", "bf16"),
    "q4_k + q8_0": (SHAPE, "q4_k", "q8_0", "bf16"),
    "q4_k + q8_0, int8": (SHAPE, "q4_k", "q8_0", "int8"),
    "fp8 + bf16": (SHAPE, "fp8", "bf16", "bf16"),
    "bf16, gpt-oss's activation": (GPT_OSS, "bf16", "bf16", "bf16"),
    "int4 + bf16, the same": (GPT_OSS, "int4", "bf16", "bf16"),
}
CUTS = {1: None, 5: MoEPlan(1, 3, gemm_from=2), 40: None}
"""Tokens, and how a call of them is cut."""


@functools.cache
def experts_of(case: str) -> PackedExperts:
    shape, fmt, down_fmt, _ = CASES[case]
    return random_experts(shape, get_format(fmt), down_fmt=get_format(down_fmt))


def inputs(case: str, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, routing = CASES[case][0], skewed_routing(T, CASES[case][0])
    x = 3 * torch.randn(T, shape.H, generator=torch.Generator().manual_seed(T))  # some are clamped
    return x.bfloat16(), routing.ids, routing.weights


@functools.cache
def truth_of(case: str, T: int) -> tuple[torch.Tensor, float]:
    """The reference's result, and the error allowed."""
    reference = functools.partial(
        ref.moe_ffn,
        *inputs(case, T),
        experts_of(case),
        dtype=torch.float64,
        h_dtype=torch.bfloat16,
        activations=CASES[case][3],
    )
    truth = reference()
    return truth, FLOAT32_SUMS + flips(reference, truth)


def compiled(kernel: str, case: str) -> MoEKernel:
    _, fmt, down_fmt, activations = CASES[case]
    if kernel != "modelled amx":
        return kernel_of(experts_of(case), kernel, activations)
    pair = (
        assemble("amx", each, activations, amx.parts(each, activations, operations(), amx_model))
        for each in (fmt, down_fmt)
    )
    return join(*pair, experts_of(case).spec)


def variant(kernel: str, case: str):
    *pair, activations = CASES[case][1:]
    marks = [needs_vnni] if kernel == "modelled amx" else []
    if not all(tried(kernel, fmt, activations) for fmt in pair):
        marks.append(only_with_all)
    return pytest.param(kernel, case, marks=marks)


KERNELS = (*names()[1:], "modelled amx")


@pytest.mark.parametrize(("kernel", "case"), [variant(k, c) for k in KERNELS for c in CASES])
def test_matches_the_reference(kernel, case):
    try:
        made = compiled(kernel, case)
    except PykernelsError as refusal:
        pytest.skip(refusal.cause)
    workspace = cpu.MoEWorkspace()
    for T, cut in CUTS.items():
        call, (x, ids, weights) = (
            cpu.MoECall(experts_of(case), made, workspace, moe_plan=cut),
            inputs(case, T),
        )
        y = cpu.run_serially(call, x, ids, weights, poisoned(*x.shape))
        assert_close(y, *truth_of(case, T), f"{T} tokens")


@pytest.mark.parametrize("case", CASES)
def test_a_pool_does_the_same(case):
    whole, (x, ids, weights) = experts_of(case), inputs(case, 5)
    shape, fmt, down_fmt, activations = CASES[case]
    with WorkerPool(2) as pool:
        routed = CpuExperts(shape, fmt, pool, "generic", activations, down_fmt)
        for e in range(shape.E):
            routed.load_expert(e, *whole.unpack(e), biases=whole.biases(e))
        y = routed(x.float(), ids, weights)
        assert routed.read_bytes == len(ids.unique()) * whole.bytes_per_expert
        assert routed.nbytes == whole.nbytes == CpuExperts.bytes_needed(shape, fmt, down_fmt)
    assert_close(y, *truth_of(case, 5))


def test_slices_add_up_to_the_whole():
    """Down's bias is one slice's; each keeps its own rows of gate's and up's."""
    shape = MoEShape(E=2, H=64, I=512, topk=1, spec=GPT_OSS.spec)
    whole = random_experts(shape, get_format("int4"), down_fmt=get_format("q6_k"))
    zeros = functools.partial(torch.zeros, dtype=torch.uint8)
    packers = [whole._packer] * 2
    found = SplitExperts(shape, whole.fmt, [zeros] * 2, packers, whole.down_fmt)
    for e in range(2):
        found.pack(e, *whole.unpack(e), biases=whole.biases(e))
        for mine, given in zip(found.unpack(e), whole.unpack(e), strict=True):
            assert torch.equal(mine.data, given.data)
        for mine, given in zip(found.biases(e), whole.biases(e), strict=True):
            assert torch.equal(mine, given)
    assert [part.shape.I for part in found.slices] == [256, 256]
    sizes = SplitExperts.slice_bytes(shape, whole.fmt, 2, whole.down_fmt)
    assert sizes == [part.nbytes for part in found.slices]
    routing = skewed_routing(3, shape)
    x = torch.randn(3, 64)
    parts = [ref.moe_ffn(x, routing.ids, routing.weights, part) for part in found.slices]
    assert_close(sum(parts), ref.moe_ffn(x, routing.ids, routing.weights, whole), 1e-5)


def test_what_does_not_fit_is_refused_by_name():
    whole = experts_of("int4 + bf16, the same")
    gate, up, down = whole.unpack(0)
    biases = whole.biases(0)
    refused = {
        "expert 0 has no biases": (gate, up, down, None),
        r"expert 0 has biases of shapes \[\(72,\), \(72,\), \(72,\)\]": (
            gate,
            up,
            down,
            Biases(biases.gate, biases.up, biases.up),
        ),
        "expert 0's down_proj": (gate, up, Weight(down.data.float()), biases),
    }
    for message, given in refused.items():
        with pytest.raises(PykernelsError, match=message):
            whole.pack(0, *given[:3], biases=given[3])
    plain = experts_of("fp8 + bf16")
    with pytest.raises(PykernelsError, match="expert 0 has biases of shapes.*spec"):
        plain.pack(0, *plain.unpack(0), biases=Biases(*torch.zeros(3, 4)))
    with pytest.raises(PykernelsError, match="bf16 weights are not multiplied with int8"):
        kernel_of(PackedExperts(SHAPE, get_format("q4_k"), down_fmt=plain.down_fmt), "auto", "int8")
