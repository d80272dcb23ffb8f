"""Experts cut across NUMA nodes: the slices hold the whole, and add up to it.

Made-up nodes (``Topology.fake``) run the real code, but for the binding of memory, which is tested
on node 0.
"""

from __future__ import annotations

import os
import platform
from types import SimpleNamespace

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.jit import task
from pykernels.cpu.job import job_at
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, PackedExperts, get_format
from pykernels.quant.split import SplitExperts, cut, most_parts, repeat_first
from pykernels.shapes import MoEShape
from pykernels.testing import assert_close, random_experts, relative_error, skewed_routing
from runtime.experts.routed import RoutedExperts
from runtime.machine import memory
from runtime.machine.memory import HUGE_PAGE, allocate
from runtime.machine.topology import Topology
from runtime.profiling.roofline import LOOPS, ReadRoof
from runtime.workers.numa import NodePools
from runtime.workers.pool import (
    TaskError,
    WorkerPool,
    configure_default_pool,
    default_pool,
    make_pool,
)
from runtime.workers.reduce import reduce

PHYSICAL = len(Topology.detect().physical)
TWO_CORES = pytest.mark.skipif(PHYSICAL < 2, reason="two made-up nodes need two cores")
SHAPE = MoEShape(E=6, H=256, I=512, topk=3)


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
    pytest.param("fp8", 512, 2, [256, 256], id="even"),
    pytest.param("fp8", 640, 2, [256, 384], id="uneven: five blocks"),
    pytest.param("fp8", 512, 4, [128] * 4, id="four nodes, a block each"),
    pytest.param("fp8", 320, 2, [128, 192], id="a ragged last block stays with the last"),
    pytest.param("fp8", 2048, 1, [2048], id="one node"),
    pytest.param("q4_k", 768, 2, [256, 512], id="superblocks"),
    pytest.param("int4-channel", 700, 2, [256, 444], id="groups of int8 inputs"),
]


@pytest.mark.parametrize(("fmt", "width", "parts", "widths"), CUTS)
def test_cuts_are_whole_blocks(fmt: str, width: int, parts: int, widths: list[int]) -> None:
    rows = cut(MoEShape(1, 128, width, 1), get_format(fmt), parts)
    assert [len(r) for r in rows] == widths
    assert [i for r in rows for i in r] == list(range(width))


def test_too_narrow_a_layer_is_told() -> None:
    shape, fmt = MoEShape(1, 128, 256, 1), get_format("fp8")
    assert most_parts(shape, fmt) == 2
    with pytest.raises(PykernelsError, match=r"width 256 in fp8 have 2 block.*across 3 NUMA nodes"):
        cut(shape, fmt, 3)
    with pytest.raises(PykernelsError, match="across 0 NUMA nodes"):
        cut(shape, fmt, 0)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("width", "parts"), [(512, 2), (768, 3)])
def test_slices_hold_the_whole_bit_for_bit(fmt: str, width: int, parts: int) -> None:
    whole = random_experts(MoEShape(2, 256, width, 1), get_format(fmt))
    found = split(whole, parts)
    for e in range(whole.shape.E):
        for got, want in zip(found.unpack(e), whole.unpack(e), strict=True):
            assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
            assert (got.scale is None) == (want.scale is None)
            assert want.scale is None or torch.equal(got.scale, want.scale)
    assert found.missing() == []
    shared = parts - 1 if fmt.endswith("-channel") else 0  # down's scales, a copy in every slice
    extra = shared * whole.down_scale[0].nbytes
    assert found.bytes_per_expert == whole.bytes_per_expert + extra


@pytest.mark.parametrize("fmt", FORMATS)
def test_slices_add_up_to_the_whole(fmt: str) -> None:
    whole, routing = random_experts(SHAPE, get_format(fmt)), skewed_routing(7, SHAPE)
    x = torch.randn(7, SHAPE.H)
    options = {"dtype": torch.float64}
    want = ref.moe_ffn(x, routing.ids, routing.weights, whole, **options)
    got = sum(
        ref.moe_ffn(x, routing.ids, routing.weights, packed, **options)
        for packed in split(whole, 2).slices
    )
    assert_close(got, want, 1e-12)


def test_a_matrix_that_does_not_fit_is_told_before_anything_is_packed() -> None:
    whole = random_experts(SHAPE, get_format("fp8"))
    found = SplitExperts(SHAPE, whole.fmt, [zeros] * 2, [whole._packer] * 2)
    gate, up, down = whole.unpack(0)
    with pytest.raises(PykernelsError, match="expert 3's down_proj has shape"):
        found.pack(3, gate, up, gate)
    # Each slice would find the rows that it takes.
    more = whole.fmt.quantize(torch.randn(SHAPE.I + 128, SHAPE.H))
    with pytest.raises(PykernelsError, match="expert 3's gate_proj has shape"):
        found.pack(3, more, up, down)
    assert found.missing() == list(range(SHAPE.E))


def load(whole: PackedExperts, pool) -> RoutedExperts:
    routed = RoutedExperts(whole.shape, whole.fmt.name, pool)
    for e in range(whole.shape.E):
        routed.load_expert(e, *whole.unpack(e))
    return routed


@TWO_CORES
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_nodes_compute_what_one_does(fmt: str, dtype: torch.dtype) -> None:
    whole = random_experts(SHAPE, get_format(fmt))
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
        counters = routed.counters
        assert counters.tokens == 44 and counters.bytes % whole.bytes_per_expert == 0


@TWO_CORES
def test_the_same_bits_at_any_threads_a_node() -> None:
    """Both nodes have all cores here, so that each can have one thread or two."""
    whole, routing = random_experts(SHAPE, get_format("fp8")), skewed_routing(9, SHAPE)
    x, seen = torch.randn(9, SHAPE.H), []
    for first, second in ((1, 1), (2, 1), (1, 2), (2, 2)):
        with WorkerPool(first) as here, WorkerPool(second, driver_works=False) as there:
            routed = load(whole, SimpleNamespace(pools=[here, there], narrow=False))
            seen += [routed(x, routing.ids, routing.weights) for _ in range(10)]
    assert all(torch.equal(y, seen[0]) for y in seen)


@TWO_CORES
@pytest.mark.parametrize("driver_works", [True, False])
def test_bits_are_those_of_the_slices_in_order(driver_works: bool) -> None:
    """Whoever computes them: serial slices, added node 0 first, are the truth to the bit."""
    whole, routing = random_experts(SHAPE, get_format("fp8")), skewed_routing(9, SHAPE)
    x = torch.randn(9, SHAPE.H)
    first, second = (
        cpu.moe_ffn(x, routing.ids, routing.weights, packed) for packed in split(whole, 2).slices
    )
    topology = Topology.fake(2)
    with NodePools(topology.nodes, 2, driver_works, topology) as pool:
        routed = load(whole, pool)
        for _ in range(20):
            assert torch.equal(routed(x, routing.ids, routing.weights), first + second)


@TWO_CORES
def test_narrow_layers_stay_on_one_node_unless_the_split_was_asked_for() -> None:
    narrow = MoEShape(E=2, H=128, I=128, topk=1)
    topology = Topology.fake(2)
    with make_pool(numa="auto", topology=topology) as pool:
        assert len(pool.pools) == 2
        assert len(RoutedExperts(narrow, "fp8", pool).weights.slices) == 1
    with make_pool(numa=2, topology=topology) as pool:  # a number may be one
        with pytest.raises(PykernelsError, match="cannot be split across 2 NUMA nodes"):
            RoutedExperts(narrow, "fp8", pool)


@TWO_CORES
def test_split_experts_cannot_go_back_to_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERNELS_FAKE_NUMA", "2")
    try:
        assert len(configure_default_pool(numa="auto").pools) == 2
        whole, routing = random_experts(SHAPE, get_format("bf16")), skewed_routing(2, SHAPE)
        routed = load(whole, None)
        configure_default_pool(numa="off")
        assert len(default_pool().pools) == 1
        with pytest.raises(PykernelsError, match=r"across 2 NUMA nodes cannot run on 1 pool"):
            routed(torch.randn(2, SHAPE.H), routing.ids, routing.weights)
    finally:
        monkeypatch.undo()
        configure_default_pool()


@TWO_CORES
def test_workers_stay_on_their_node() -> None:
    topology = Topology.fake(2)
    with NodePools(topology.nodes, 2, False, topology) as pool:
        for node, each in zip(topology.nodes, pool.pools, strict=True):
            for thread in each._threads:
                assert os.sched_getaffinity(thread.native_id) <= set(node.cores)
        assert pool.threads == sum(len(each._threads) for each in pool.pools)


@TWO_CORES
@pytest.mark.parametrize("threads", [1, PHYSICAL + 1])
def test_threads_that_do_not_fit_the_nodes_are_refused(threads: int) -> None:
    topology = Topology.fake(2)
    with pytest.raises(PykernelsError, match=f"{threads} threads asked for on 2 NUMA nodes"):
        NodePools(topology.nodes, threads, True, topology)


@TWO_CORES
def test_a_failure_on_one_node_ends_the_call_on_all_and_names_the_expert() -> None:
    whole = random_experts(SHAPE, get_format("bf16"))
    with make_pool(numa="2", topology=Topology.fake(2)) as pool:
        routed = load(whole, pool)
        x, ids, weights = torch.randn(1, SHAPE.H), torch.tensor([[2, 4, 5]]), torch.ones(1, 3)
        good = routed(x, ids, weights)
        job = routed._bind()[1]._moe.job
        kernel, job["run_gate_up"] = int(job["run_gate_up"][0]), _broken(1).address
        with pytest.raises(TaskError, match="gate-up task .* of expert 4 failed with status 77"):
            routed(x, ids, weights)
        job["run_gate_up"] = kernel
        assert torch.equal(routed(x, ids, weights), good)


def _broken(active: int):
    """A gate-up task that fails on one active expert."""

    @task("broken-gate-up")
    def broken(job_address, index, worker):
        job = job_at(job_address)
        return 77 if index // job.i_chunks == active else 0

    return broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("T", "H", "parts"),
    [(1, 7168, 2), (3, 130, 4), (300, 1024, 3)],
    ids=["decode, serial", "four nodes", "prefill, on the workers"],
)
def test_partials_are_added_in_order_and_rounded_once(dtype, T: int, H: int, parts: int) -> None:
    partials = [torch.randn(T, H) for _ in range(parts)]
    want = partials[0].clone()
    for part in partials[1:]:
        want += part
    y = torch.full((T, H), float("nan"), dtype=dtype)
    with make_pool(numa="off") as pool:
        reduce(partials, y, pool.pools[0])
    assert torch.equal(y, want.to(dtype))


def test_memory_is_bound_to_its_node_before_it_is_touched() -> None:
    if problem := memory.binding_problem(0):
        pytest.skip(problem)
    bound, free = allocate(3 * HUGE_PAGE, node=0), allocate(3 * HUGE_PAGE)
    assert memory.policy_node(bound) == 0 and memory.policy_node(free) is None
    assert memory.page_nodes(bound) == {-2}  # ENOENT: no page is there yet
    bound.fill_(1)
    assert memory.page_nodes(bound) == {0}


def test_memory_of_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(PykernelsError, match="the system refuses mbind"):
        allocate(HUGE_PAGE, node=1000)
    assert "mbind" in (memory.binding_problem(1000) or "")


def test_a_kernel_without_the_call_is_told_apart_from_a_node_without_memory(monkeypatch) -> None:
    monkeypatch.setitem(memory._SYSCALLS, platform.machine(), (9999, 9999, 9999))
    with pytest.raises(PykernelsError, match="Function not implemented.*--cap-add SYS_NICE"):
        allocate(HUGE_PAGE, node=0)
    monkeypatch.undo()
    with pytest.raises(PykernelsError, match="Invalid argument.*numactl --hardware"):
        allocate(HUGE_PAGE, node=1000)


def test_nodes_beyond_the_first_word_of_a_mask_are_bound_to(monkeypatch) -> None:
    masks = []
    monkeypatch.setattr(memory, "_call", lambda which, *given: masks.append(list(given[3])))
    memory._bind(0, 4096, 70)
    assert masks == [[0, 1 << 6, *[0] * 14]]


@pytest.mark.parametrize(("second", "node"), [(0, 3), (1, None)], ids=["one node", "two"])
def test_memory_is_bound_to_a_node_if_to_no_other(monkeypatch, second: int, node) -> None:
    def told(which, mode, mask, *_: object) -> None:
        mode._obj.value, mask[0], mask[1] = 2, 1 << 3, second

    monkeypatch.setattr(memory, "_call", told)
    assert memory.policy_node(zeros(1)) == node


def test_memory_that_is_elsewhere_than_it_was_bound_to_is_a_problem(monkeypatch) -> None:
    monkeypatch.setattr(memory, "_call", lambda *_: None)  # a sandbox that takes all and does none
    tried = memory.binding_problem.__wrapped__
    assert tried(0) == "memory bound to node 0 is not there"


@TWO_CORES
def test_the_read_roof_of_two_nodes_reads_every_byte_of_both() -> None:
    with make_pool(numa="2", topology=Topology.fake(2)) as pool:
        roof = ReadRoof(pool, 64 << 20)
        for loop in LOOPS:
            assert 0 < roof.once(loop) < 10_000 and roof.was_read
            roof._sums.fill(0)
            assert not roof.was_read


def test_repeated_experts_are_all_the_first() -> None:
    whole = random_experts(SHAPE, get_format("fp8"))
    found = split(whole, 2)
    repeat_first(found)
    for got, want in zip(found.unpack(5), whole.unpack(0), strict=True):
        assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
