"""A small layer on a pool of its own, for tests of what comes between its calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch

from pykernels.quant import PackedExperts, get_format
from pykernels.shapes import MoEShape
from pykernels.testing import random_experts, skewed_routing
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import WorkerPool

SHAPE = MoEShape(E=6, H=128, I=256, topk=2)
TWO_CORES = pytest.mark.skipif(
    len(Topology.detect().physical) < 2, reason="two made-up nodes need two cores"
)


@functools.cache
def packed() -> PackedExperts:
    return random_experts(SHAPE, get_format("bf16"))


def load(pool: WorkerPool | None) -> RoutedExperts:
    routed = RoutedExperts(SHAPE, "bf16", pool, "generic")
    for e in range(SHAPE.E):
        routed.load_expert(e, *packed().unpack(e))
    return routed


def inputs(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    routing = skewed_routing(T, SHAPE)
    x = torch.randn(T, SHAPE.H, generator=torch.Generator().manual_seed(T))
    return x.bfloat16(), routing.ids, routing.weights


def elsewhere(function: Callable[[], object]) -> list[object]:
    """Runs it on another thread, to its end; its result, or what it raised."""
    out: list[object] = []

    def run() -> None:
        try:
            out.append(function())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return out
