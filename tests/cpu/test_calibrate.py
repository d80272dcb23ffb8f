"""The two paths that calibration times, on modelled AMX tiles; experts take what was calibrated."""

from __future__ import annotations

import pytest
import torch

from pykernels.cpu import make_kernel
from pykernels.cpu.backends import amx
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.isa import instructions
from pykernels.cpu.moe.kernel import NEVER, assemble
from pykernels.env import env
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import assert_close
from runtime.experts.routed import RoutedExperts
from runtime.machine import tuning
from runtime.machine.topology import Topology
from runtime.machine.tuning import Choices
from runtime.profiling import workload
from runtime.profiling.calibrate import PathTimer
from runtime.workers.pool import WorkerPool, make_pool

from .routed import TWO_CORES

AVX512 = next(b for b in kernels() if b.name == "avx512").supports("bf16", detect()) is None
SMALL = MoEShape(E=2, H=128, I=128, topk=2)


@pytest.mark.skipif(not AVX512, reason="the modelled tiles are decoded in AVX-512")
def test_both_paths_compute_the_same_and_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "layers_out_of_cache", lambda *_: 3)
    parts = amx.parts("bf16", "bf16", instructions(detect()), amx_model)
    modelled = assemble("amx", "bf16", "bf16", parts)
    monkeypatch.setattr("runtime.experts.routed.make_kernel", lambda *_: modelled)
    with WorkerPool(1) as pool:
        timer = PathTimer("bf16", pool, "avx512", shape=SMALL, max_tokens=5)
        for tokens in (2, 5):
            tiles, gemm = timer.call("tiles", tokens), timer.call("gemm", tokens)
            assert tiles.shape == (tokens, 128)
            assert_close(gemm.float(), tiles.float(), 0.01)
            assert timer.seconds("gemm", tokens) > 0
        turns = {
            path: [i for i, layer in enumerate(layers) if layer._bound]
            for path, layers in timer._experts.items()
        }
        assert turns == {"tiles": [0], "gemm": [1, 2]}  # each call reads another layer's weights
        for path, gemm_from in (("tiles", NEVER), ("gemm", 1)):
            ran = {
                int(part._moe.job["gemm_from"][0])
                for experts in timer._experts[path]
                if experts._bound
                for part in experts._bound[1]
            }
            assert ran == {gemm_from}


def test_experts_take_what_this_machine_was_calibrated_to(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``resolve`` says "amx", nothing is compiled: what is chosen is known before the weights."""
    backend = next(b for b in kernels() if b.name == "amx")
    monkeypatch.setattr("runtime.experts.routed.resolve", lambda *_: backend)
    with env.override(cache_dir=tmp_path):
        assert RoutedExperts(SMALL, "bf16").choices == tuning.default("amx", "bf16")
        tuning.write(detect().cpu, tuning.key("amx", "bf16"), Choices(gemm_from=11), {})
        assert RoutedExperts(SMALL, "bf16").choices.gemm_from == 11
        assert RoutedExperts(SMALL, "int4").choices.gemm_from == amx.GEMM_FROM


@pytest.mark.parametrize("name", [b.name for b in kernels()])
def test_backends_with_a_gemm_are_listed(name: str) -> None:
    backend = next(b for b in kernels() if b.name == name)
    if backend.supports("bf16", detect()) is not None:
        pytest.skip(f"{name} does not run here")
    assert make_kernel(name, "bf16").has_gemm == (backend.gemm_from is not None)


def test_results_are_the_same_bits_on_one_thread_and_on_all(tmp_path) -> None:
    """A skewed call cut for one thread and for every core (the cut is by threads)."""
    shape = MoEShape(E=8, H=256, I=256, topk=2)
    ids = workload.routings(shape, 40, "zipf", 1)
    x = torch.randn(40, shape.H).bfloat16()
    weights = torch.rand(40, shape.topk)
    results = []
    for threads in {1, Topology.detect().usable}:
        with WorkerPool(threads) as pool:
            (layer, *_) = workload.RandomLayers(shape, "bf16", ids, pool).experts("auto")
            results.append(layer(x, ids[0], weights))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=TWO_CORES)])
def test_layers_are_copies_of_the_first_in_memory_of_their_own(monkeypatch, nodes: int) -> None:
    monkeypatch.setattr(workload, "layers_out_of_cache", lambda *_: 3)
    shape, told = MoEShape(E=4, H=64, I=256, topk=2), list[float]()
    made = make_pool(2, True, "2", Topology.fake(2)) if nodes == 2 else WorkerPool(1)
    with made as pool:
        ids = [torch.tensor([[0, 1]])]
        layers = workload.RandomLayers(shape, "int4", ids, pool, told.append).packed
        kept = {part.gate_up.data_ptr() for layer in layers for part in layer.slices}
        assert (len(layers), len(kept), told) == (3, 3 * nodes, [1 / 3, 2 / 3])
        for layer in layers:
            assert layer.missing() == []
            for got, wanted in zip(layer.unpack(3), layers[0].unpack(0), strict=True):
                assert torch.equal(got.data, wanted.data)
                assert torch.equal(got.scale, wanted.scale)
