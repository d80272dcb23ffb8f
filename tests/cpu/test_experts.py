"""Routed experts on the pool: the serial kernel's bits at any thread count, and honest counters."""

from __future__ import annotations

import errno
import mmap
import os
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.roofline import NEEDS, make_compute
from pykernels.env import env
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, PackedExperts, get_format
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import assert_close, balanced_routing, random_experts, skewed_routing
from runtime.experts.launch import Part
from runtime.experts.routed import RoutedExperts
from runtime.machine.memory import HUGE_PAGE, allocate
from runtime.machine.topology import Topology
from runtime.profiling.roofline import LOOPS, ReadRoof, Roofs, read_roof
from runtime.workers.counters import Counters
from runtime.workers.pool import Call, WorkerPool

USABLE = Topology.detect().usable
SHAPE = MoEShape(E=16, H=512, I=256, topk=4)


def _load(
    experts: PackedExperts, pool: WorkerPool | None = None, kernel="auto", activations="bf16"
) -> RoutedExperts:
    routed = RoutedExperts(experts.shape, experts.fmt.name, pool, kernel, activations)
    for e in range(experts.shape.E):
        routed.load_expert(e, *experts.unpack(e))
    return routed


@pytest.mark.parametrize(
    ("fmt", "activations"),
    [*((fmt, "bf16") for fmt in FORMATS), *((fmt, "int8") for fmt in ("int8", "int4", "q6_k"))],
)
@pytest.mark.parametrize("T", [1, 3, 50])
def test_the_same_bits_at_any_thread_count(fmt, activations, T):
    experts, routing = random_experts(SHAPE, get_format(fmt)), skewed_routing(T, SHAPE)
    x = torch.randn(T, SHAPE.H)
    how = {"activations": activations}
    serial = cpu.moe_ffn(x, routing.ids, routing.weights, experts, **how)
    for threads in range(1, USABLE + 1):
        with WorkerPool(threads) as pool:
            routed = _load(experts, pool, **how)
            for _ in range(20):
                assert torch.equal(routed(x, routing.ids, routing.weights), serial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_reference_in_the_dtype_of_x(dtype):
    experts, routing = random_experts(SHAPE, get_format("fp8")), balanced_routing(9, SHAPE)
    x = torch.randn(9, SHAPE.H).to(dtype)
    y = _load(experts)(x, routing.ids, routing.weights)
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts, dtype=torch.float64)
    assert y.dtype == dtype
    assert_close(y, truth, 0.006)


def test_layers_share_a_pool_and_sizes_may_change():
    small, large = MoEShape(E=4, H=128, I=64, topk=2), MoEShape(E=20, H=512, I=160, topk=6)
    with WorkerPool(USABLE) as pool:
        layers = [_load(random_experts(s, get_format(f)), pool)
                  for s, f in ((small, "fp8"), (large, "bf16"))]  # fmt: skip
        for T in (1, 30, 2, 100, 1):
            for layer in layers:
                routing = balanced_routing(T, layer.shape, seed=T)
                x = torch.randn(T, layer.shape.H)
                truth = ref.moe_ffn(x, routing.ids, routing.weights, layer.weights)
                assert_close(layer(x, routing.ids, routing.weights), truth, 0.006)


def test_a_call_refused_on_a_busy_pool_leaves_the_one_in_flight_alone():
    a, b = (random_experts(SHAPE, get_format("fp8"), seed) for seed in (1, 2))
    one, other = balanced_routing(4, SHAPE, 1), balanced_routing(4, SHAPE, 2)
    x = torch.randn(4, SHAPE.H)
    with WorkerPool(1) as pool:  # nothing is computed before sync: all of it would be spoilt
        first, second = _load(a, pool), _load(b, pool)
        wanted = first(x, one.ids, one.weights)
        ticket = first.submit(x, one.ids, one.weights)
        with pytest.raises(PykernelsError, match="still running on this pool"):
            second.submit(2 * x, other.ids, other.weights)
        assert torch.equal(first.sync(ticket), wanted)
        second(x, other.ids, other.weights)


def test_a_call_prepared_by_one_thread_is_not_spoilt_by_another(monkeypatch):
    experts, routing = random_experts(SHAPE, get_format("fp8")), balanced_routing(4, SHAPE)
    x, said = torch.randn(4, SHAPE.H), []
    arrange = Part.arrange

    def other() -> None:
        with pytest.raises(PykernelsError, match="another thread prepares a call") as error:
            second(2 * x, routing.ids, routing.weights)
        said.append(error.value)

    def interrupted(self, *arguments):
        arrange(self, *arguments)
        if self is first._bind()[0]:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    with WorkerPool(1) as pool:
        first, second = _load(experts, pool), _load(experts, pool)
        wanted = first(x, routing.ids, routing.weights)
        first(x[:1], routing.ids[:1], routing.weights[:1])  # so that the next is arranged anew
        monkeypatch.setattr(Part, "arrange", interrupted)
        assert torch.equal(first(x, routing.ids, routing.weights), wanted)
        assert len(said) == 1
        with pytest.raises(PykernelsError, match="names expert"):  # what it claimed is free again
            second(x, routing.ids + 99, routing.weights)
        claimed, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (pool.claim(), claimed.set(), done.wait()))
        thread.start()
        claimed.wait()
        with pytest.raises(PykernelsError, match="another thread prepares a call"):
            pool.start(Call(0, 0, 0, 0, 0, 0))
        done.set()
        thread.join()
        pool.start(Call(0, 0, 0, 0, 0, 0))  # a claim of a thread that has ended bars nobody


def test_between_submit_and_sync_the_caller_is_free():
    experts, routing = random_experts(SHAPE, get_format("fp8")), balanced_routing(5, SHAPE)
    routed = _load(experts)
    x = torch.randn(5, SHAPE.H)
    expected = routed(x, routing.ids, routing.weights)
    ticket = routed.submit(x, routing.ids, routing.weights)
    x.fill_(float("nan"))  # was copied
    assert torch.equal(routed.sync(ticket), expected)


def test_strided_inputs_and_half_precision_weights():
    experts, routing = random_experts(SHAPE, get_format("bf16")), balanced_routing(6, SHAPE)
    routed = _load(experts)
    x = torch.randn(6, SHAPE.H)
    expected = routed(x, routing.ids, routing.weights.bfloat16().float())
    wide = torch.randn(6, 2 * SHAPE.H)
    wide[:, ::2] = x
    ids = routing.ids.T.contiguous().T
    assert torch.equal(routed(wide[:, ::2], ids, routing.weights.bfloat16()), expected)


def test_counters_count_distinct_experts():
    experts = random_experts(SHAPE, get_format("fp8"))
    routed = _load(experts)
    ids = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5], [2, 3, 4, 5]])
    routed(torch.randn(3, SHAPE.H), ids, torch.ones(3, 4))
    counters = routed.counters
    assert (counters.calls, counters.tokens) == (1, 3)
    assert counters.bytes == 6 * experts.bytes_per_expert
    assert 0 < counters.seconds < 1
    counters.reset()
    assert (counters.calls, counters.bytes, counters.seconds) == (0, 0, 0.0)


def test_calls_of_several_pools_are_counted_in_the_same_units() -> None:
    counters = Counters()
    for _ in range(2):
        counters.add(3, 5_000, 0.75)
    told = counters.calls, counters.tokens, counters.bytes, counters.seconds
    assert told == (2, 6, 10_000, 1.5)


def test_dropped_experts_give_their_memory_back_at_once():
    """No reference cycle: a layer can be gigabytes, and the collector may be long in coming."""
    routed = RoutedExperts(SHAPE, "fp8")
    gone = weakref.ref(routed.weights)
    del routed
    assert gone() is None


def test_zero_tokens():
    routed = _load(random_experts(SHAPE, get_format("bf16")))
    y = routed(torch.empty(0, SHAPE.H), torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4))
    assert y.shape == (0, SHAPE.H)


def test_misuse_is_told_and_the_experts_stay_usable():
    routed = RoutedExperts(SHAPE, "fp8")
    routing = balanced_routing(1, SHAPE)
    args = torch.randn(1, SHAPE.H), routing.ids, routing.weights
    with pytest.raises(PykernelsError, match="16 of 16 experts are not loaded"):
        routed(*args)
    routed = _load(random_experts(SHAPE, get_format("fp8")))
    ticket = routed.submit(*args)
    with pytest.raises(PykernelsError, match="in flight"):
        routed.submit(*args)
    routed.sync(ticket)
    with pytest.raises(PykernelsError, match="not the call in flight"):
        routed.sync(ticket)
    with pytest.raises(PykernelsError, match="in a layer of 16"):
        routed(args[0], args[1] + 100, args[2])
    assert routed(*args).isfinite().all()


def test_after_an_interrupt_right_behind_submit_the_pool_can_be_settled():
    routed, routing = _load(random_experts(SHAPE, get_format("fp8"))), balanced_routing(1, SHAPE)
    args = torch.randn(1, SHAPE.H), routing.ids, routing.weights
    expected = routed(*args)
    routed.submit(*args)  # and nobody has the ticket
    routed.pool.settle()
    assert torch.equal(routed(*args), expected)


def test_huge_page_memory_is_aligned_and_zero():
    memory = allocate(3 * HUGE_PAGE + 5)
    assert memory.data_ptr() % HUGE_PAGE == 0 and memory.numel() == 3 * HUGE_PAGE + 5
    assert memory[::4096].eq(0).all() and memory[-1] == 0
    with pytest.raises(PykernelsError, match="GiB"):
        allocate(1 << 62)


@pytest.mark.skipif(Topology.detect().huge_pages == "unknown", reason="no huge pages here")
@pytest.mark.parametrize(
    ("asked", "nbytes"), [(True, HUGE_PAGE), (False, HUGE_PAGE), (True, HUGE_PAGE - 1)]
)
def test_memory_asks_for_huge_pages_unless_told_not_to_or_too_little(asked, nbytes):
    with env.override(hugepages=asked):
        memory = allocate(nbytes)
    expected = asked and nbytes >= HUGE_PAGE
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for mapping in filter(None, mappings):
        first, last = (int(at, 16) for at in mapping.split(" ", 1)[0].split("-"))
        if first <= memory.data_ptr() < last:
            if (flags := re.search(r"(?m)^VmFlags:(.*)$", mapping)) is None:
                pytest.skip("the system does not tell flags of memory")
            assert ("hg" in flags[1].split()) == expected  # man 5 proc: huge page advise flag
            return
    raise AssertionError("the memory is in no mapping")


def test_a_kernel_that_knows_no_huge_pages_gives_plain_ones(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("runtime.machine.memory.mmap.mmap", Plain)
    assert allocate(HUGE_PAGE).eq(0).all()
    assert allocate(0).numel() == 0  # a format without scales


@pytest.mark.skipif("avx512f" not in detect().isa, reason="loops of AVX-512 instructions")
def test_without_bf16_products_the_compute_roof_is_that_of_fma(monkeypatch):
    monkeypatch.setattr("runtime.profiling.roofline.roof_bytes", lambda: 16 << 20)
    with WorkerPool(1) as pool, env.override(isa=frozenset({"avx512bf16"})):
        roofs = Roofs(pool, detect())
        roofs.sample()
        name, rate = roofs.compute("avx512")
        assert name == "vfmadd231ps" and 0 < rate < 10
        assert roofs.compute("generic") == ("", 0.0)


@pytest.mark.skipif("avx512f" not in detect().isa, reason="loops of AVX-512 instructions")
@pytest.mark.parametrize("name", ["vfmadd231ps", "vdpbf16ps", "vpdpbusd"])
def test_a_compute_roof_is_a_loop_of_its_instruction_on_registers(name, tmp_path):
    if missing := detect().lacks(NEEDS[name]):
        pytest.skip(f"this CPU lacks {missing}")
    with env.override(cache_dir=tmp_path):  # code that comes from the cache has no assembly
        assembly = make_compute.__wrapped__(name)._library.get_asm_str()
    family = name.replace("231", r"\d+")  # whichever operand is overwritten
    products = re.findall(rf"{family}\s.*", assembly)
    assert len(products) >= 16
    assert not [line for line in products if "(" in line], "an operand lies in memory"


def test_the_read_roof_reads_every_byte():
    with WorkerPool(USABLE) as pool:
        roof = ReadRoof(pool, 64 << 20)
        for loop in LOOPS:
            assert 0 < roof.once(loop) < 10_000 and roof.was_read
            roof._sums.fill(0)
            assert not roof.was_read


def test_the_read_roof_gives_its_memory_back(monkeypatch):
    made = []

    def spy(nbytes, node=None):
        memory = allocate(nbytes, node)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr("runtime.profiling.roofline.allocate", spy)
    monkeypatch.setattr("runtime.profiling.roofline.roof_bytes", lambda: 12 << 20)
    with WorkerPool(1) as pool:
        assert read_roof(pool) > 0
    assert [memory() for memory in made] == [None]
