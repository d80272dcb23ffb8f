"""A small layer on a pool, for tests of its calls."""

from __future__ import annotations

import functools

import pytest
import torch

from pykernels.quant import PackedExperts, get_format
from pykernels.shapes import MoEShape
from pykernels.testing import random_experts, skewed_routing
from runtime.devices.cpu.routed import CpuExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import WorkerPool

SHAPE = MoEShape(E=6, H=128, I=256, topk=2)
TWO_CORES = pytest.mark.skipif(
    len(Topology.detect().physical) < 2, reason="two made-up nodes need two cores"
)


@functools.cache
def packed(fmt: str = "bf16", shape: MoEShape = SHAPE, seed: int = 0) -> PackedExperts:
    return random_experts(shape, get_format(fmt), seed)


def load(
    pool: WorkerPool | None,
    experts: PackedExperts | None = None,
    kernel: str = "generic",
    activations: str = "bf16",
) -> CpuExperts:
    experts = experts or packed()
    routed = CpuExperts(experts.shape, experts.fmt.name, pool, kernel, activations)
    for e in range(experts.shape.E):
        routed.load_expert(e, *experts.unpack(e))
    return routed


def inputs(T: int, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = T if seed is None else seed
    routing = skewed_routing(T, SHAPE, seed)
    x = torch.randn(T, SHAPE.H, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16(), routing.ids, routing.weights
