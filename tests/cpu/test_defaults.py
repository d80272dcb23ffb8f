"""What torch makes unless told otherwise, of which type and where, is nothing to the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from runtime.machine.topology import Topology
from runtime.workers.pool import WorkerPool, make_pool

from .routed import TWO_CORES, inputs, load


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "wider than float32": lambda: _dtype(torch.float64),
    "narrower": lambda: _dtype(torch.bfloat16),
    "elsewhere": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=TWO_CORES)])
@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
def test_a_call_is_the_same_whatever_torch_makes_by_default(default, nodes):
    given = [inputs(T) for T in (3, 40, 300)]
    with make_pool(2, True, "2", Topology.fake(2)) if nodes == 2 else WorkerPool(1) as pool:
        routed = load(pool)
        wanted = [routed(*each).clone() for each in given]
    with make_pool(2, True, "2", Topology.fake(2)) if nodes == 2 else WorkerPool(1) as pool:
        routed = load(pool)
        with default():
            results = [routed(*each) for each in given]
    for y, want in zip(results, wanted, strict=True):
        assert y.dtype is want.dtype and y.is_cpu and torch.equal(y, want)
