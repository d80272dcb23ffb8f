"""The AMX backend on real tiles: the model's results, at any thread count."""

from __future__ import annotations

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.backends import amx
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.isa import instructions
from pykernels.cpu.moe.kernel import assemble, join
from pykernels.quant import FORMATS, get_format
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import (
    assert_close,
    balanced_routing,
    fit,
    poisoned,
    random_experts,
    skewed_routing,
)
from runtime.devices.cpu.routed import CpuExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import WorkerPool

from ..cpu.kernels import formats, variant

pytestmark = pytest.mark.amx
SHAPE = MoEShape(E=8, H=640, I=288, topk=3)


VARIANTS = [
    variant("modelled amx", fmt, activations, fmt, activations, id=f"{fmt}-{activations}")
    for fmt in FORMATS
    for activations in ("bf16", "int8")
    if activations == "bf16" or FORMATS[fmt].int8_kind
]


@pytest.mark.parametrize(("fmt", "activations"), VARIANTS)
@pytest.mark.parametrize("T", [1, 13, 100, 900])
def test_real_tiles_do_what_the_model_does(fmt, activations, T):
    shape = fit(SHAPE, get_format(fmt))
    experts, routing = random_experts(shape, get_format(fmt)), skewed_routing(T, shape)
    x = torch.randn(T, shape.H).bfloat16()
    parts = amx.parts(fmt, activations, instructions(detect()), amx_model)
    modelled = assemble("amx", fmt, activations, parts)
    call = cpu.MoECall(experts, join(modelled), cpu.MoEWorkspace())
    expected = cpu.run_serially(call, x, routing.ids, routing.weights, poisoned(T, shape.H))
    y = cpu.moe_ffn(
        x.float(), routing.ids, routing.weights, experts, kernel="amx", activations=activations
    )
    truth = ref.moe_ffn(
        x, routing.ids, routing.weights, experts, dtype=torch.float64, activations=activations
    )
    assert_close(y, truth, 0.006)
    assert_close(y, expected, 2e-4 if activations == "bf16" else 2e-3, "against the model")


@pytest.mark.parametrize("fmt", formats())
def test_the_same_bits_at_any_thread_count(fmt):
    shape = fit(SHAPE, get_format(fmt))
    experts, routing = random_experts(shape, get_format(fmt)), balanced_routing(200, shape)
    x = torch.randn(200, shape.H)
    serial = cpu.moe_ffn(x, routing.ids, routing.weights, experts, kernel="amx")
    usable = Topology.detect().usable
    for threads in sorted({1, min(2, usable), min(3, usable), usable}):
        with WorkerPool(threads) as pool:
            routed = CpuExperts(shape, fmt, pool, kernel="amx")
            for e in range(shape.E):
                routed.load_expert(e, *experts.unpack(e))
            for _ in range(5):
                assert torch.equal(routed(x, routing.ids, routing.weights), serial)
