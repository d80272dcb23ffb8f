"""The AMX backend on real tiles: the model's results, at any thread count."""

from __future__ import annotations

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.instructions import instructions
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.moe import build_kernel
from pykernels.quant import FORMATS, get_format
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import (
    assert_close,
    balanced_routing,
    poisoned,
    random_experts,
    skewed_routing,
)
from runtime.experts import RoutedExperts
from runtime.pool import WorkerPool
from runtime.roofline import ComputeRoof
from runtime.topology import Topology

pytestmark = pytest.mark.amx
SHAPE = MoEShape(E=8, H=640, I=288, topk=3)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("T", [1, 13, 100, 900])
def test_real_tiles_do_what_the_model_does(fmt, T):
    experts, routing = random_experts(SHAPE, get_format(fmt)), skewed_routing(T, SHAPE)
    x = torch.randn(T, SHAPE.H).bfloat16()
    modelled = build_kernel("avx512", fmt, "bf16", instructions(detect()), amx_model)
    call = cpu.MoECall(experts, modelled, cpu.Workspace())
    expected = cpu.run_serially(call, x, routing.ids, routing.weights, poisoned(T, SHAPE.H))
    y = cpu.moe_ffn(x.float(), routing.ids, routing.weights, experts, kernel="amx")
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts, dtype=torch.float64)
    assert_close(y, truth, 0.006)
    assert_close(y, expected, 2e-4, "against the modelled tiles")


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_same_bits_at_any_thread_count(fmt):
    experts, routing = random_experts(SHAPE, get_format(fmt)), balanced_routing(200, SHAPE)
    x = torch.randn(200, SHAPE.H)
    serial = cpu.moe_ffn(x, routing.ids, routing.weights, experts, kernel="amx")
    for threads in (1, 2, 3, Topology.detect().usable):
        with WorkerPool(threads) as pool:
            routed = RoutedExperts(SHAPE, fmt, pool, kernel="amx")
            for e in range(SHAPE.E):
                routed.load_expert(e, *experts.unpack(e))
            for _ in range(5):
                assert torch.equal(routed(x, routing.ids, routing.weights), serial)


def test_the_compute_roofs_are_plausible():
    with WorkerPool(1) as pool:
        assert ComputeRoof(pool, "amx").once() > 2 * ComputeRoof(pool, "avx512").once() > 0.1
