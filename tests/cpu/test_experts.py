"""Routed experts on the pool: the serial kernel's bits, one call at a time, honest figures."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from pykernels import cpu, ref
from pykernels.cpu.intrin.sync import clock_ns, pause
from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from pykernels.testing import assert_close, balanced_routing, skewed_routing
from runtime.devices.cpu.routed import CpuExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import TaskError, WorkerPool, make_pool

from .routed import TWO_CORES, inputs, load, packed

USABLE = Topology.detect().usable
SHAPE = MoEShape(E=8, H=512, I=256, topk=4)


@task("slow")
def slow(args, index, worker):
    """Takes 20 ms."""
    end = clock_ns() + 20_000_000
    while clock_ns() < end:
        pause()
    return 0


@task("failing")
def failing(args, index, worker):
    return 77


def pause_until_interrupted() -> None:
    time.sleep(60)


@contextmanager
def gate_up(routed: CpuExperts, replacement):
    """Runs another gate-up task in its place."""
    calls = [call.args for call in routed._bound.step._context.calls]
    for args in calls:
        kernel, args["run_gate_up"] = int(args["run_gate_up"][0]), replacement.address
    yield
    for args in calls:
        args["run_gate_up"] = kernel


@pytest.mark.parametrize(
    ("fmt", "activations"),
    [
        *((fmt, "bf16") for fmt in ("bf16", "fp8", "int4", "q4_k")),
        *((fmt, "int8") for fmt in ("int8", "q4_k")),
    ],
)
def test_the_same_bits_at_any_thread_count(fmt, activations):
    experts = packed(fmt, SHAPE)
    calls = []
    for T in (1, 50):
        x, routing = torch.randn(T, SHAPE.H), skewed_routing(T, SHAPE)
        given = x, routing.ids, routing.weights
        calls.append((given, cpu.moe_ffn(*given, experts, activations=activations)))
    for threads in range(1, USABLE + 1):
        with WorkerPool(threads) as pool:
            routed = load(pool, experts, "auto", activations)
            for given, serial in calls:
                for _ in range(5):
                    assert torch.equal(routed(*given), serial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_reference_in_the_dtype_of_x(dtype):
    """Layers of different sizes share a pool; zero tokens are a call too."""
    large = MoEShape(E=20, H=512, I=160, topk=6)
    with WorkerPool(USABLE) as pool:
        layers = [load(pool, packed("fp8", SHAPE)), load(pool, packed("bf16", large))]
        for T in (1, 30, 0, 2, 100, 1):
            for layer in layers:
                routing = balanced_routing(T, layer.shape, seed=T)
                given = torch.randn(T, layer.shape.H).to(dtype), routing.ids, routing.weights
                y, want = layer(*given), ref.moe_ffn(*given, layer.weights, dtype=torch.float64)
                assert y.dtype == dtype and y.shape == given[0].shape
                if T:
                    assert_close(y, want, 0.006)


def test_what_runs_meanwhile_may_use_the_pool_or_fail(pool):
    first, second = load(pool), load(pool, packed(seed=1))
    wanted, other = first(*inputs(4)), second(*inputs(2))
    for _ in range(2):
        y, meanwhile = first.run(*inputs(4), lambda: second(*inputs(2)))
        assert torch.equal(y, wanted) and torch.equal(meanwhile, other)
        with pytest.raises(ZeroDivisionError):
            first.run(*inputs(3), lambda: 1 / 0)


def test_threads_get_right_results():
    with WorkerPool(min(2, USABLE)) as pool:
        layers = [load(pool), load(pool)]
        wanted = {T: layers[0](*inputs(T)).clone() for T in (1, 2, 33)}
        outcomes: list[bool] = []

        def call(routed: CpuExperts, T: int) -> None:
            for _ in range(100):
                outcomes.append(torch.equal(routed(*inputs(T)), wanted[T]))

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(call, 3 * layers, [*wanted, *wanted]))
        assert len(outcomes) == 600 and all(outcomes)


@pytest.mark.parametrize("driver_works", [True, False])
def test_ctrl_c_is_raised_when_the_call_has_ended(driver_works):
    with WorkerPool(1, driver_works) as pool:
        routed = load(pool)
        wanted = routed(*inputs(2)).clone()
        with gate_up(routed, slow):
            for _ in range(20):  # on a busy machine it may come before the call has begun
                start = time.monotonic()
                with pytest.raises(KeyboardInterrupt):
                    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                    routed(*inputs(2))
                    pause_until_interrupted()
                if time.monotonic() - start >= 0.1:
                    break
            else:
                pytest.fail("no call was let end")
        assert torch.equal(routed(*inputs(2)), wanted)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=TWO_CORES)])
def test_a_failing_call_names_the_expert_and_counts_nothing(nodes):
    with make_pool(nodes, True, nodes, Topology.fake(nodes)) as pool:
        routed = load(pool)
        wanted, read = routed(*inputs(3)), routed.read_bytes
        with gate_up(routed, failing):
            with pytest.raises(
                TaskError, match=r"task \d+ of experts\S* \(gate-up of expert \d\) failed .* 77"
            ):
                routed(*inputs(3))
        assert routed.read_bytes == read
        assert torch.equal(routed(*inputs(3)), wanted)
        assert routed.read_bytes == 2 * read


def test_figures_are_of_distinct_experts(pool):
    experts = packed("fp8", SHAPE)
    routed = load(pool, experts)
    ids = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5], [2, 3, 4, 5]])
    routed(torch.randn(3, SHAPE.H), ids, torch.ones(3, 4))
    assert routed.read_bytes == 6 * experts.bytes_per_expert
    assert routed.read_seconds > 0


def test_dropped_experts_free_their_memory_at_once():
    """No reference cycle: a layer can be gigabytes, and the collector may be long in coming."""
    routed = load(None)
    routed(*inputs(2))
    gone = weakref.ref(routed.weights)
    del routed
    assert gone() is None


def test_experts_may_change_their_pool():
    routed, wanted = load(None), []
    for _ in range(2):
        with WorkerPool(1) as routed._own_pool:
            wanted += [routed(*inputs(3)), routed(*inputs(3))]
    assert all(torch.equal(y, wanted[0]) for y in wanted)
    with pytest.raises(PykernelsError, match="is closed"):
        routed(*inputs(3))


def test_experts_that_are_not_loaded_are_named(pool):
    routed = CpuExperts(SHAPE, "fp8", pool)
    routing = balanced_routing(1, SHAPE)
    with pytest.raises(PykernelsError, match="8 of 8 experts are not loaded"):
        routed(torch.randn(1, SHAPE.H), routing.ids, routing.weights)


def test_any_topk_and_experts_that_come_twice_add_up(pool):
    routed, (x, ids, _) = load(pool), inputs(2)
    one = routed(x.float(), ids[:, :1], torch.ones(2, 1))
    many = routed(x.float(), ids[:, :1].expand(2, 12), torch.full((2, 12), 0.25))
    torch.testing.assert_close(many, 3 * one)


def test_a_result_is_detached_and_as_inference_mode_makes_it(pool):
    routed, (x, ids, weights) = load(pool), inputs(2)
    with torch.inference_mode():  # what a first call makes must serve others too
        routed(*inputs(1))
    assert not routed(x.float().requires_grad_(), ids, weights.requires_grad_()).requires_grad
    for mode in (False, False, True, True, False):
        with torch.inference_mode(mode):
            assert routed(*inputs(1)).is_inference() is mode


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=TWO_CORES)])
@pytest.mark.parametrize("default", [torch.float64, torch.device("meta")], ids=str)
def test_torch_defaults_change_no_call(default, nodes):
    given, results = [inputs(T) for T in (3, 300)], []
    for changed in (False, True):
        with make_pool(nodes, True, nodes, Topology.fake(nodes)) as pool:
            routed = load(pool)
            try:
                if changed and isinstance(default, torch.dtype):
                    torch.set_default_dtype(default)
                elif changed:
                    torch.set_default_device(default)
                results.append([routed(*each) for each in given])
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
    for want, y in zip(*results, strict=True):
        assert y.dtype is want.dtype and y.is_cpu and torch.equal(y, want)
