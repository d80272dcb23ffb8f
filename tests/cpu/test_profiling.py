"""The roofs, random layers out of cache, and the two paths that calibration times."""

from __future__ import annotations

import functools
import os
import re
import time

import pytest
import torch

from pykernels.cpu import make_kernel
from pykernels.cpu.moe.kernel import NO_GEMM
from pykernels.cpu.roofline import NEEDS, make_compute
from pykernels.env import env
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import detect
from runtime.devices.cpu.routed import CpuExperts
from runtime.machine import tuning
from runtime.machine.kept import DAY
from runtime.machine.topology import Topology
from runtime.planning.prefill_rates import Rates
from runtime.profiling import roofline, workload
from runtime.profiling.roofline import LOOPS, ReadRoof
from runtime.program import Program
from runtime.runner.measured.kept_rates import kept_rates
from runtime.workers.pool import make_pool

from .routed import TWO_CORES

NODES = pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=TWO_CORES)])
SMALL = MoEShape(E=2, H=128, I=128, topk=2)


@NODES
def test_the_read_roof_reads_every_byte_of_every_node(nodes: int) -> None:
    with make_pool(numa=nodes, topology=Topology.fake(nodes)) as pool:
        roof = ReadRoof(pool, 64 << 20)
        for loop in LOOPS:
            assert roof.once(loop) > 0 and roof.was_read
            roof._sums.fill(0)
            assert not roof.was_read


@pytest.mark.parametrize("name", [name for name in NEEDS if name[0] == "v"])
def test_a_compute_roof_is_a_loop_of_products_on_registers(name, tmp_path) -> None:
    if missing := detect().lacks(NEEDS[name]):
        pytest.skip(f"this CPU lacks {missing}")
    with env.override(cache_dir=tmp_path):  # code that comes from the cache has no assembly
        assembly = make_compute.__wrapped__(name)._library.get_asm_str()
    family = name.split()[0].replace("231", r"\d+")  # whichever operand is overwritten
    products = re.findall(rf"{family}\s.*", assembly)
    assert len(products) >= 12
    assert not [line for line in products if "(" in line], "an operand lies in memory"


@NODES
def test_layers_are_copies_of_the_first_in_other_memory(monkeypatch, nodes: int) -> None:
    monkeypatch.setattr(workload, "layers_out_of_cache", lambda *_: 3)
    shape, shares = MoEShape(E=4, H=64, I=256, topk=2), list[float]()
    with make_pool(nodes, True, nodes, Topology.fake(nodes)) as pool:
        ids = [torch.tensor([[0, 1]])]
        layers = workload.RandomLayers(shape, "int4", ids, pool, shares.append).packed
        addresses = {part.gate_up.data_ptr() for layer in layers for part in layer.slices}
        assert (len(layers), len(addresses), shares) == (3, 3 * nodes, [1 / 3, 2 / 3])
        for layer in layers:
            assert layer.missing() == []
            for got, wanted in zip(layer.unpack(3), layers[0].unpack(0), strict=True):
                assert torch.equal(got.data, wanted.data)
                assert torch.equal(got.scale, wanted.scale)


def test_experts_take_what_this_machine_was_calibrated_to(tmp_path, monkeypatch) -> None:
    """``resolve`` says "amx", nothing is compiled."""
    amx = next(b for b in kernels() if b.name == "amx")
    monkeypatch.setattr("runtime.devices.cpu.routed.resolve", lambda *_: amx)
    with env.override(cache_dir=tmp_path):
        assert CpuExperts(SMALL, "bf16").gemm_from == tuning.default("amx", "bf16")
        tuning.write("amx", {"bf16": 11})
        assert CpuExperts(SMALL, "bf16").gemm_from == 11
        assert CpuExperts(SMALL, "int4").gemm_from == tuning.default("amx", "int4")


@pytest.mark.parametrize("name", [b.name for b in kernels()])
def test_backends_with_a_gemm_are_listed(name: str) -> None:
    backend = next(b for b in kernels() if b.name == name)
    if backend.supports("bf16", detect()) is not None:
        pytest.skip(f"{name} does not run here")
    assert make_kernel(name, "bf16").has_gemm == (tuning.default(name, "bf16") < NO_GEMM)


def test_the_read_roof_is_measured_once_a_day(tmp_path, monkeypatch) -> None:
    """And again where a run was faster, or nothing can be read."""
    measured = iter((8.0, 20.0, 21.0, 22.0))
    monkeypatch.setattr(roofline, "read_roof", lambda pool: next(measured))
    with env.override(cache_dir=tmp_path / "new"):
        kept = functools.partial(roofline.kept_read_roof, 2, lambda: None)
        assert [kept(), kept(), kept(9.0), kept(9.0)] == [8.0, 8.0, 20.0, 20.0]
        (file,) = (tmp_path / "new").iterdir()
        file.write_text("damaged")
        assert kept() == 21.0
        os.utime(file, (0, time.time() - 2 * DAY))
        assert kept() == 22.0
    with env.override(cache_dir=tmp_path / "new" / file.name):  # a file, where nothing can be kept
        monkeypatch.setattr(roofline, "read_roof", lambda pool: 5.0)
        assert kept() == 5.0


def test_rates_of_prompts_are_measured_once_a_day(tmp_path) -> None:
    """And again for another kernel, other formats, or a link that is slower."""
    both = Rates(1.0, ((64, 0.1), (256, 0.3)), ((64, 0.1),), ((64, 0.25),))
    measured = []

    def rates(kernel: str, stream_s: float, name: str = "w") -> Rates:
        program = Program("p", (), {}, {"T": 1}, {name: None})  # type: ignore[dict-item]
        return kept_rates(
            program, (), 2, kernel, (64, True), stream_s, lambda: measured.append(kernel) or both
        )

    with env.override(cache_dir=tmp_path):
        assert rates("avx2", 1.0) == rates("avx2", 1.05) == both and len(measured) == 1
        rates("amx", 1.0), rates("avx2", 1.0, "v")
        assert len(measured) == 3
        rates("avx2", 1.2)
        assert len(measured) == 4
