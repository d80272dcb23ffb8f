"""Which layers' keys and values lie in main memory beside a GPU, and how they come to it. No GPU is
asked, no weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import model
from model.architectures.decoder import Decoder
from model.checkpoint import memory
from model.checkpoint.cache_cost import CacheCost
from model.llm import meta_decoder
from pykernels.errors import PykernelsError
from runtime.devices.cuda.layouts import CudaLayouts
from runtime.engine.scheduling.config import EngineConfig
from runtime.passes.gpu.offload_kv import host_caches, offload_kv
from runtime.planning.compile import compile
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import ExecutionPlan, Phase, largest_step
from runtime.planning.gpu.capacity import free_after_steps
from runtime.planning.gpu.fit import fitted
from runtime.planning.gpu.kv import bytes_in_main, cached_layers, with_attention
from runtime.planning.gpu.machine import Machine
from runtime.planning.gpu.plan import place_on, plan_on_gpus
from runtime.program.analysis import on_streams

from ...model import tiny

GPU = "cuda:0"
SIZES = largest_step(4096, 2048, 64, 2)
LAYERS = tuple(range(6))


def machine(nbytes: int, caps: bool = False) -> Machine:
    return Machine({GPU: nbytes}, CudaLayouts(), caps={GPU: nbytes} if caps else {})


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return meta_decoder(model.EMBEDDED)


def planned(decoder: Decoder, there: Machine, **how: float | str) -> ExecutionPlan:
    placement = place_on(there, decoder, SIZES, "cpu")
    return fitted(decoder, there, ExecutionPlan(SIZES, placement), **how)


@pytest.fixture(scope="module")
def needed(decoder: Decoder) -> tuple[int, int]:
    """Bytes of a GPU that has all of it but the experts; of the cache of one layer."""
    whole = planned(decoder, machine(1 << 40))
    assert not whole.placement.kv_in_main
    free = free_after_steps(decoder, machine(1 << 40), whole, 64)[GPU]
    sizes = cached_layers(compile(decoder, whole, Phase.PROMPT, 64).parts[GPU])
    assert tuple(sizes) == LAYERS and len(set(sizes.values())) == 1
    return (1 << 40) - free, sizes[0]


def test_few_caches_leave_the_gpu_and_before_dense_weights(
    decoder: Decoder, needed: tuple[int, int]
) -> None:
    every, layer = needed
    assert planned(decoder, machine(every)).placement.kv_in_main == ()
    there = machine(every - layer // 2)
    three = planned(decoder, there)
    assert three.placement.kv_in_main == (1, 3, 5), "three go, and two come back as buffers"
    assert not three.placement.residency
    assert free_after_steps(decoder, there, three, 64)[GPU] >= 0
    all_but = planned(decoder, machine(every - 4 * layer - (1 << 20))).placement
    assert all_but.kv_in_main == LAYERS
    assert all_but.residency, "dense weights cross when no cache is left to go"


def test_what_is_asked_for_is_kept(decoder: Decoder, needed: tuple[int, int]) -> None:
    every, layer = needed
    there = machine(1 << 40)
    assert planned(decoder, there, kv=0).placement.kv_in_main == LAYERS
    plan = planned(decoder, there, kv=5 * layer / 2**30)
    assert len(plan.placement.kv_in_main) == 3
    compiled = compile(decoder, plan, Phase.DECODE, 1)
    assert bytes_in_main(compiled.program, decoder.caches(SIZES.pages)) == 3 * layer
    config = ExecutionConfig(GPU, experts="cpu")
    found = plan_on_gpus(config, decoder, there, 4096, SIZES, plan.placement).decisions
    assert any("keys and values of 3 of 6 layers" in line for line in found)


def test_layers_with_windows_leave_first(tmp_path: Path) -> None:
    tiny.make(tmp_path, "gpt_oss", num_hidden_layers=8)
    decoder = meta_decoder(tmp_path)
    plan = ExecutionPlan(SIZES, place_on(machine(1 << 40), decoder, SIZES, "cpu"))
    nodes = compile(decoder, plan).program.nodes
    windowed = {node.layer for node in nodes if node.op == "attention" and node.attr("window")}
    assert len(windowed) == 4
    layer = next(iter(cached_layers(compile(decoder, plan).parts[GPU]).values()))
    for kept, count in ((8, 0), (7, 3), (6, 4), (4, 6), (0, 8)):
        asked = kept * layer / 2**30
        chosen = fitted(decoder, machine(1 << 40), plan, kv=asked).placement.kv_in_main
        assert len(chosen) == count
        assert windowed <= set(chosen) or set(chosen) <= windowed


def test_room_for_prompts_is_worth_caches_unless_in_vain(
    decoder: Decoder, needed: tuple[int, int]
) -> None:
    every, layer = needed
    layers = [
        planned(decoder, machine(every + more), prefill=way).placement.kv_in_main
        for more, way in ((0, "cpu"), (0, "auto"), (1 << 32, "auto"))
    ]
    assert layers[0] == layers[2] == ()
    assert layers[1] == (), "it would not do"


def test_a_cap_below_what_is_needed_says_what_would_do(decoder: Decoder) -> None:
    with pytest.raises(PykernelsError, match=r"may take .* \(gpu_gib\).* Give gpu_gib \d+\.\d"):
        planned(decoder, machine(1 << 20, caps=True))
    planned(decoder, machine(1 << 40, caps=True))


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PROMPT])
def test_pages_come_while_the_layer_in_front_is_computed(phase: Phase, decoder: Decoder) -> None:
    plan = planned(decoder, machine(1 << 40), kv=0)
    program = compile(decoder, plan, phase, 64).parts[GPU]
    order, nodes = on_streams(program), program.nodes
    loads = {n.layer: i for i, n in enumerate(nodes) if n.op == "load_pages"}
    attends = {n.layer: i for i, n in enumerate(nodes) if n.op == "attention"}
    stores = {n.layer: i for i, n in enumerate(nodes) if n.op == "store_rows"}
    assert list(loads) == list(stores) == list(LAYERS)
    for layer in LAYERS[:-1]:
        assert order.is_before(loads[layer], attends[layer])
        assert not order.is_before(attends[layer], loads[layer + 1])
    for layer in LAYERS[:-2]:  # whose staging is taken again
        assert order.is_before(attends[layer], loads[layer + 2])
    assert host_caches(program) == {
        n for n in program.buffers if program.buffers[n].kind == "cache"
    }


def test_decode_steps_attend_where_that_took_less_time(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=3)
    decoder, config = meta_decoder(tmp_path), ExecutionConfig(GPU, experts="cpu", kv_gpu_gib=0)
    sizes = largest_step(64, 16, 16, 2)
    placement = place_on(machine(1 << 36), decoder, sizes, "cpu")
    placement = fitted(decoder, machine(1 << 36), ExecutionPlan(sizes, placement), kv=0).placement
    plan = plan_on_gpus(config, decoder, machine(1 << 36), 64, sizes, placement)
    assert plan.measures_kv and plan.is_open
    for cpu_s, where in ((0.01, "cpu"), (0.03, GPU)):
        found = with_attention(plan, 64, gpu_s=0.02, cpu_s=cpu_s)
        assert not found.measures_kv
        for phase, device in ((Phase.DECODE, where), (Phase.PROMPT, GPU)):
            nodes = compile(decoder, found, phase, 4).program.nodes
            assert {node.device for node in nodes if node.op == "attention"} == {device}
    with pytest.raises(PykernelsError, match="dual_batch with kv_attention cpu"):
        both = replace(config, kv_attention="cpu", dual_batch=True)
        plan_on_gpus(both, decoder, machine(1 << 36), 64, sizes, placement)


def test_what_cannot_be_is_refused_in_a_line(decoder: Decoder) -> None:
    with pytest.raises(PykernelsError, match="kv_gpu_gib='much'"):
        ExecutionConfig(GPU, kv_gpu_gib="much")
    with pytest.raises(PykernelsError, match="gpu_gib=-1"):
        ExecutionConfig(GPU, gpu_gib=-1)
    with pytest.raises(PykernelsError, match="gpu_gib=16 without a GPU"):
        ExecutionConfig(gpu_gib=16).check_device()
    with pytest.raises(PykernelsError, match=f"attends on {GPU}"):
        offload_kv(decoder.lower().on(GPU), (0,))
    plan = planned(decoder, machine(1 << 40), kv=0)
    with pytest.raises(PykernelsError, match="Apply it once"):
        offload_kv(compile(decoder, plan).program, (0,))


def test_a_cache_may_take_main_memory_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 30)
    config, sizes = EngineConfig(kv_tokens=64 * 100), (4096, CacheCost(1 << 14), 0, {})
    assert memory.cache_pages(config, *sizes, on_gpu=1 << 20) == 100
    with pytest.raises(PykernelsError, match=r"kv_tokens=\d+ at most"):
        memory.cache_pages(replace(config, kv_tokens=1 << 17), *sizes, on_gpu=1 << 20)
    with pytest.raises(PykernelsError, match="Keys and values of 3 layers"):
        memory.check_cache(1 << 14, 1 << 10, 3, 1 << 29)
    memory.check_cache(1 << 14, 1 << 8, 3, 1 << 29)
