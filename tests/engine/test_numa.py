"""The engine on made-up NUMA nodes: what each computes, where weights lie, and what crosses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.conversion import convert
from model.llm import LLM
from pykernels.env import env
from pykernels.quant import PackedMatrix
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.cpu.weights import layouts
from runtime.devices.ref.step import RefExecutable
from runtime.machine import memory
from runtime.machine.nodes import MemoryNodes
from runtime.machine.topology import NumaNode, Topology
from runtime.passes import defer, offload
from runtime.passes.numa import split_over_nodes
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.planning.work import crossing_bytes, weight_bytes
from runtime.program import Program
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs
from runtime.workers.pool import WorkerPool

from ..cpu.routed import TWO_CORES
from ..model import tiny

BF16 = 0.05
"""A share of the norm of a token's logits."""
T = 12
WIDE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_intermediate_size": 256, "intermediate_size": 384},
    "gemma4_text": {
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"intermediate_size": 256},
    "qwen2_moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
}
"""Experts that can be cut; deepseek_v3's and qwen2_moe's shared ones too."""

TWO = MemoryNodes((None, None))
MATRICES = {"linear", "per_head_linear", "moe_ffn"}

pytestmark = TWO_CORES


@pytest.fixture(autouse=True)
def two_made_up_nodes() -> Iterator[None]:
    with env.override(fake_numa=2):
        yield


def run(llm: LLM, program: Program, device: str = "cpu", pool: WorkerPool | None = None) -> Any:
    """Logits [T, V] of T tokens of one sequence."""
    inputs = allocate_inputs(program) | {
        "tokens": torch.arange(20, 20 + T),
        "positions": torch.arange(T),
        "slot_mapping": torch.arange(T),
        "logits_indices": torch.arange(T),
    }
    caches = {name: part.zeros() for name, part in llm.runner.model.caches(1).items()}
    if device == "ref":
        caches = {name: pages.float() for name, pages in caches.items()}
    step: Any
    compiled = Compiled.of(program, (pool or llm.pool).memory)
    step = (
        RefExecutable(compiled, llm.runner.weights, inputs, caches, pool, "generic")
        if device == "ref"
        else CpuExecutable(
            compiled.parts["cpu"], llm.runner.weights, pool or llm.pool, inputs, caches
        )
    )
    step.sizes[:] = torch.tensor([T, 1, T])
    step.run()
    return step.outputs["logits"].clone()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


def twice() -> Topology:
    """This machine as two nodes, each with all cores, so that each can have one thread or two."""
    found = Topology.detect()
    node = NumaNode(None, found.cores, found.memory_total, found.memory_available)
    return replace(found, cores=2 * found.cores, nodes=(node, node))


@pytest.mark.parametrize("family", WIDE)
def test_a_split_model_is_transformers_whatever_the_threads(family: str, tmp_path: Path) -> None:
    made = tiny.make(tmp_path, family, num_hidden_layers=2, **WIDE[family])
    with torch.no_grad():
        truth = made.reference(torch.arange(20, 20 + T)[None]).logits[0]
    with model.load_engine(tmp_path, max_model_len=64, kernel="generic", numa="auto") as llm:
        half = llm.pool.threads // 2
        assert [(node.first, node.count) for node in llm.pool.nodes] == [(0, half), (half, half)]
        whole = llm.runner.model.lower(StepSizes(T, 1, T, 1, 1))
        split = split_over_nodes(whole, TWO)
        sliced = {node.op for node in split.nodes if node.numa == 1}
        assert sliced == MATRICES & {node.op for node in whole.nodes}
        shared = [n for n in split.nodes if n.op in sliced and n.numa is None]
        assert all(split.weight(node, "weight").shape[0] <= 32 for node in shared)  # one block
        found = run(llm, whole)
        assert error(found, truth) < BF16
        topology = twice()
        for threads in (3, 4):
            with WorkerPool(threads, True, topology, topology.nodes) as pool:
                assert torch.equal(run(llm, whole, pool=pool), found)


def test_the_cpus_half_of_a_program_is_split_too(tmp_path: Path) -> None:
    """What it submits is a sum of several, deferred or not."""
    tiny.make(tmp_path, "deepseek_v3", num_hidden_layers=3, **WIDE["deepseek_v3"])
    with model.load_engine(tmp_path, max_model_len=64, kernel="generic") as llm:
        whole = on_ref(defer(llm.runner.model.lower(StepSizes(T, 1, T, 1, 1)), 1))
        found = run(llm, offload(whole), "ref", pool=llm.pool)
        assert error(found, run(llm, whole, "ref")) < BF16


def test_what_crosses_nodes_is_counted(tmp_path: Path) -> None:
    """Linears and experts read weights of their own node alone; what is left are activations."""
    settings = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1, **settings)
    with model.load_engine(tmp_path, max_model_len=64, kernel="generic") as llm:
        whole = llm.runner.model.lower(StepSizes(8, 1, 1, 1, 1))
    split = split_over_nodes(whole, TWO)
    before, after = crossing_bytes(whole, 2, context=64), crossing_bytes(split, 2, context=64)
    assert before.weights == weight_bytes(whole) // 2  # half of what is interleaved
    assert after.weights == 0
    k = split.buffers["layer0.k"]
    assert after.cache == before.cache == 64 * 2 * 2 * k.shape[2] * k.shape[3] // 2
    reads = {  # how often, by whoever did not write it alone
        "embedded": 2,
        "layer0.input_norm.out": 2,  # by both slices of a linear
        "layer0.qkv": 1,
        "angles": 1,
        "layer0.rotated": 1,
        "layer0.attn_out": 2,
        "layer0.attended": 1,
        "layer0.post_norm.out": 4,  # the gate's slices, the experts'
        "layer0.post_norm.sum": 1,
        "layer0.logits": 1,
        "layer0.ids": 2,
        "layer0.weights": 2,
        "layer0.routed.node0": 1,
        "layer0.routed.node1": 1,
        "normed": 2,
    }
    widths = {name: math.prod(split.shape(name)[1:]) for name in reads}
    sizes = {name: width * split.buffers[name].dtype.itemsize for name, width in widths.items()}
    assert after.activations == sum(times * sizes[name] for name, times in reads.items())


def test_a_node_works_in_memory_of_its_own(tmp_path: Path, monkeypatch) -> None:
    """The system is not asked, but what it would be asked for is noted."""
    bound: list[tuple[range, list[int]]] = []
    monkeypatch.setattr(
        memory,
        "_bind",
        lambda at, nbytes, _, nodes: bound.append((range(at, at + nbytes), list(nodes))),
    )
    tiny.make(tmp_path, "deepseek_v3", num_hidden_layers=2, **WIDE["deepseek_v3"])
    detected = Topology.fake(2)
    numbered = [replace(node, number=i) for i, node in enumerate(detected.nodes)]
    found = replace(detected, nodes=tuple(numbered))
    monkeypatch.setattr(Topology, "detect", lambda *_: found)
    monkeypatch.setattr(memory, "binding_problem", lambda _: None)
    with model.load_engine(tmp_path, max_model_len=64, kernel="generic") as llm:
        assert llm.pool.memory == MemoryNodes((0, 1))
        program = llm.runner.steps[0].program

        def places(tensor: torch.Tensor) -> list[list[int]]:
            """The nodes of its bytes, but for the page where a slice begins."""
            inside = range(
                tensor.data_ptr() + memory.mmap.PAGESIZE, tensor.data_ptr() + tensor.nbytes
            )
            return [
                nodes for at, nodes in bound if at.start < inside.stop and inside.start < at.stop
            ]

        seen = 0
        for node in program.nodes:
            for port in node.weights:
                spec = program.weight(node, port)
                weight = llm.runner.weights.get(spec, *layouts(program)(node, port))
                parts = [getattr(weight, name, None) for name in ("blocks", "arena")]
                for part in (part for part in parts if part is not None):
                    want = [0, 1] if node.numa is None else [node.numa]
                    assert all(nodes == want for nodes in places(part)), node
                    seen += bool(places(part))
        assert seen > 20
        cache = next(iter(llm.runner.caches.values()))
        assert places(cache) == [[0, 1]]


def test_a_packed_cache_is_copied_into_slices(tmp_path: Path) -> None:
    made, packed = tmp_path / "made", tmp_path / "packed"
    made.mkdir()
    tiny.make(made, "deepseek_v3", num_hidden_layers=2, **WIDE["deepseek_v3"])
    convert(made, packed, "q8_0")
    logits, stores = [], []
    for numa in ("off", "auto"):
        with model.load_engine(packed, max_model_len=64, kernel="generic", numa=numa) as llm:
            program = llm.runner.model.lower(StepSizes(T, 1, T, 1, 1))
            logits.append(run(llm, program))
            stores.append(llm.runner.weights)
    assert error(logits[1], logits[0]) < 1e-2
    layout_of = layouts(program)
    for node in program.nodes:
        for port in {"weight", "heads"} & {*node.weights}:
            spec = program.weight(node, port)
            mine, other = (store.get(spec, *layout_of(node, port)) for store in reversed(stores))
            assert not isinstance(other, PackedMatrix) or torch.equal(mine.blocks, other.blocks)
        if node.op == "moe_ffn":
            spec = program.weight(node, "experts")
            whole, split = (store.get(spec, *layout_of(node, "experts")) for store in stores)
            assert len(split.slices) == 2
            for e in range(spec.shape[0]):
                both = zip(split.unpack(e), whole.unpack(e), strict=True)
                assert all(torch.equal(mine.data, other.data) for mine, other in both)
