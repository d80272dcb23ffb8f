"""Experts cut across NUMA nodes: the slices hold the whole, and add up to it.

Made-up nodes (``Topology.fake``) run the real code, except for the binding of memory
(``test_memory.py``).
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from pykernels import cpu
from pykernels.cpu.intrin.sync import atomic_add
from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, PackedExperts, get_format
from pykernels.quant.split import SplitExperts, cut, most_parts
from pykernels.shapes import MoEShape
from pykernels.testing import relative_error, skewed_routing
from runtime.devices.cpu.routed import CpuExperts
from runtime.machine.topology import NumaNode, Topology
from runtime.workers.job import Job, in_parallel
from runtime.workers.pool import WorkerPool, make_pool

from . import routed
from .routed import TWO_CORES, packed

SHAPE = MoEShape(E=6, H=256, I=512, topk=3)


def load(whole: PackedExperts, pool) -> CpuExperts:
    return routed.load(pool, whole, "auto")


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def split(whole: PackedExperts, parts: int) -> SplitExperts:
    fmt = whole.fmt
    packer = whole._packer
    found = SplitExperts(whole.shape, fmt, [zeros] * parts, [packer] * parts)
    for e in range(whole.shape.E):
        found.pack(e, *whole.unpack(e))
    return found


CUTS = [
    pytest.param("fp8", 640, 2, [256, 384], id="uneven: five blocks"),
    pytest.param("fp8", 512, 4, [128] * 4, id="four nodes, a block each"),
    pytest.param("fp8", 320, 2, [128, 192], id="a ragged last block stays with the last"),
    pytest.param("q4_k", 768, 2, [256, 512], id="superblocks"),
    pytest.param("int4-channel", 700, 2, [256, 444], id="groups of int8 inputs"),
]


@pytest.mark.parametrize(("fmt", "width", "parts", "widths"), CUTS)
def test_cuts_are_whole_blocks(fmt: str, width: int, parts: int, widths: list[int]) -> None:
    rows = cut(MoEShape(1, 128, width, 1), get_format(fmt), parts)
    assert [len(r) for r in rows] == widths
    assert [i for r in rows for i in r] == list(range(width))


def test_too_narrow_a_layer_is_refused() -> None:
    shape, fmt = MoEShape(1, 128, 256, 1), get_format("fp8")
    assert most_parts(shape, fmt) == 2
    with pytest.raises(PykernelsError, match=r"width 256 in fp8 have 2 block.*across 3 NUMA nodes"):
        cut(shape, fmt, 3)
    with pytest.raises(PykernelsError, match="across 0 NUMA nodes"):
        cut(shape, fmt, 0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_slices_hold_the_whole_bit_for_bit(fmt: str) -> None:
    whole, parts = packed(fmt, MoEShape(2, 256, 768, 1)), 3
    found = split(whole, parts)
    for e in range(whole.shape.E):
        for got, want in zip(found.unpack(e), whole.unpack(e), strict=True):
            assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
            assert (got.scale is None) == (want.scale is None)
            assert want.scale is None or torch.equal(got.scale, want.scale)
    assert found.missing() == []
    taken = SplitExperts(whole.shape, whole.fmt, [zeros] * parts, [whole._packer] * parts)
    taken.take(whole)
    assert taken.missing() == []
    for own, other in zip(taken.slices, found.slices, strict=True):
        for section, wanted in zip(own.sections, other.sections, strict=True):
            assert torch.equal(section, wanted)
    shared = parts - 1 if fmt.endswith("-channel") else 0  # down's scales, a copy in every slice
    extra = shared * whole.down_scale[0].nbytes
    assert found.bytes_per_expert == whole.bytes_per_expert + extra


def test_a_matrix_that_does_not_fit_is_refused_before_packing() -> None:
    whole = packed("fp8", SHAPE)
    found = SplitExperts(SHAPE, whole.fmt, [zeros] * 2, [whole._packer] * 2)
    gate, up, down = whole.unpack(0)
    with pytest.raises(PykernelsError, match="expert 3's down_proj has shape"):
        found.pack(3, gate, up, gate)
    # Each slice would find the rows that it takes.
    more = whole.fmt.quantize(torch.randn(SHAPE.I + 128, SHAPE.H))
    with pytest.raises(PykernelsError, match="expert 3's gate_proj has shape"):
        found.pack(3, more, up, down)
    assert found.missing() == list(range(SHAPE.E))


@TWO_CORES
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_nodes_compute_what_one_does(fmt: str, dtype: torch.dtype) -> None:
    whole = packed(fmt, SHAPE)
    with make_pool(numa="2", topology=Topology.fake(2)) as pool:
        routed = load(whole, pool)
        for T in (1, 40, 0, 3):
            routing, x = skewed_routing(max(T, 1), SHAPE), torch.randn(T, SHAPE.H).to(dtype)
            ids, weights = routing.ids[:T], routing.weights[:T]
            y = routed(x, ids, weights)
            want = cpu.moe_ffn(x, ids, weights, whole)
            assert y.dtype == dtype and y.shape == x.shape
            # h is the same to the bit; the sums are split in two, and rounded to dtype once.
            assert T == 0 or relative_error(y, want) < (1e-6 if dtype == torch.float32 else 2**-9)
        assert routed.read_bytes > 0 == routed.read_bytes % whole.bytes_per_expert


def twice() -> Topology:
    """This machine as two nodes, each with all cores, so that each can have one thread or two."""
    found = Topology.detect()
    node = NumaNode(None, found.cores, found.memory_total, found.memory_available)
    return replace(found, cores=2 * found.cores, nodes=(node, node))


@TWO_CORES
@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("driver_works", [True, False])
def test_bits_are_those_of_the_slices_in_order(threads: int, driver_works: bool) -> None:
    whole, routing, topology = packed("fp8", SHAPE), skewed_routing(9, SHAPE), twice()
    given = torch.randn(9, SHAPE.H), routing.ids, routing.weights
    first, second = (cpu.moe_ffn(*given, part) for part in split(whole, 2).slices)
    with WorkerPool(threads, driver_works, topology, topology.nodes) as pool:
        routed = load(whole, pool)
        for _ in range(10):
            assert torch.equal(routed(*given), first + second)


@TWO_CORES
@pytest.mark.parametrize("driver_works", [True, False])
def test_workers_stay_on_their_node(driver_works: bool) -> None:
    topology = Topology.fake(2)
    with WorkerPool(2, driver_works, topology, topology.nodes) as pool:
        for node, workers in zip(topology.nodes, pool.nodes, strict=True):
            for worker in range(workers.first, workers.first + workers.count):
                if driver_works and worker == 0:
                    continue  # the driver, which is not pinned
                thread = pool._threads[worker - driver_works]
                assert os.sched_getaffinity(thread.native_id) <= set(node.cores)


@task("fake-who")
def who(record, index, worker):
    """Counts the tasks of each worker."""
    atomic_add(record + 8 * worker, 1)
    return 0


@TWO_CORES
@pytest.mark.parametrize("driver_works", [True, False])
def test_a_job_of_a_node_is_run_by_its_workers_alone(driver_works: bool) -> None:
    topology = twice()
    counts = np.zeros((3, 4), np.int64)
    jobs = [
        Job("fake", who.address, row.ctypes.data, tasks=200, node=node)
        for row, node in zip(counts, (0, 1, None), strict=True)
    ]
    with WorkerPool(4, driver_works, topology, topology.nodes) as pool:
        together = in_parallel(jobs)
        for _ in range(20):
            pool.run(together)
    assert counts.sum(1).tolist() == [4000] * 3
    assert not counts[0, 2:].any() and not counts[1, :2].any()
