"""Attention of mixed batches on the cuda device: decodes, chunks in pieces, prefixes, padding.

In Triton's interpreter where there is no GPU. The truth is the ref device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from runtime.devices.cuda.memory.buffers import Arena, StepOutputs, allocated_caches
from runtime.devices.cuda.step.channels import ChannelBuffers
from runtime.devices.cuda.step.executable import CudaExecutable, GpuMemory
from runtime.devices.cuda.step.inputs import Bucket, StepInputs
from runtime.devices.ref.step import RefExecutable
from runtime.kv_cache.layout import PAGE, CacheSpec
from runtime.passes.gpu.metadata import MAX_CHUNK, gpu_metadata
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program import Builder, Program
from runtime.program.step_inputs import allocate_inputs, step_inputs
from runtime.program.weights import WeightStore
from runtime.workers.pool import WorkerPool

from ..engine import test_expanded as mla

NH, KVH, D, S, PAGES = 4, 2, 16, 5, 3
BF16 = 0.02
"""A share of the norm: the GPU's queries, probabilities and results are bfloat16."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, driver_works=False) as made:
        yield made


@dataclass(frozen=True)
class Step:
    """By sequence, in the order of the batch: row of the page table -> (first, last) position."""

    spans: dict[int, tuple[int, int]]

    @property
    def T(self) -> int:
        return sum(last - first for first, last in self.spans.values())

    def fill(self, inputs: dict[str, torch.Tensor], seed: int) -> None:
        """Writes a step into what programs read, in random pages."""
        g = torch.Generator().manual_seed(seed)
        for name in inputs:
            if inputs[name].is_floating_point():
                inputs[name].normal_(generator=g)
        t = 0
        for s, (row, (first, last)) in enumerate(self.spans.items()):
            at, positions = slice(t, t + last - first), torch.arange(first, last)
            inputs["sequences"][at], inputs["positions"][at] = row, positions
            pages = inputs["page_table"][row][positions // PAGE]
            inputs["slot_mapping"][at] = pages * PAGE + positions % PAGE
            inputs["query_starts"][s], inputs["query_lengths"][s] = t, last - first
            inputs["lengths"][s], inputs["page_rows"][s] = last, row
            t += last - first


def results(
    program: Program,
    weights: WeightStore,
    parts: dict[str, Any],
    steps: list[Step],
    pool: WorkerPool,
    device: torch.device,
    max_chunk: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(found, truth) of the tokens of each step."""
    inputs = allocate_inputs(program)
    by_token = ("tokens", "is_prompt")
    for name in (*by_token, "query_starts", "query_lengths", "lengths", "page_rows"):
        count = program.sizes["T" if name in by_token else "S"]
        inputs.setdefault(name, torch.zeros(count, dtype=torch.int64))
    inputs.setdefault("logits_indices", torch.zeros(1, dtype=torch.int64))
    rows = program.sizes["S"]
    places = torch.randperm(rows * PAGES, generator=torch.Generator().manual_seed(3))
    inputs["page_table"][:] = places.view(rows, PAGES)
    exact = {name: part.zeros() for name, part in parts.items()}
    exact = {n: x.float() if x.dtype == torch.bfloat16 else x for n, x in exact.items()}
    truth = RefExecutable(Compiled.of(on_ref(program)), weights, inputs, exact)
    nodes = tuple(replace(node, device="cuda") for node in program.nodes)
    within = replace(program.buffers["attn_out"], kind="scratch")  # as in a model: bfloat16
    buffers = {**program.buffers, "attn_out": within}
    made = gpu_metadata(replace(program, nodes=nodes, buffers=buffers), max_chunk=max_chunk)
    bucket = Bucket(StepInputs(inputs, None, {"cuda": device}, max_chunk), made)
    kinds = {"angles": torch.float32}
    floats = {
        name: torch.zeros(x.shape, dtype=kinds.get(name, torch.bfloat16), device=device)
        for name, x in inputs.items()
        if x.is_floating_point()
    }
    sizes = torch.zeros(3, dtype=torch.int64)
    found = CudaExecutable(
        Compiled.of(made),
        weights,
        {"cuda": GpuMemory(device, bucket.on["cuda"] | floats, Arena(device))},
        pool,
        "generic",
        {},
        allocated_caches(made, {"cuda": device}),
        sizes,
        ChannelBuffers({"cuda": device}),
        {"cuda": StepOutputs({}, device).of({})},
    )
    for seed, step in enumerate(steps):
        step.fill(inputs, seed)
        for name, x in floats.items():
            x.copy_(inputs[name])
            inputs[name].copy_(x)  # rounded alike
        truth.sizes[:] = torch.tensor([step.T, len(step.spans), 1])
        truth.run()
        bucket.send(step.T, len(step.spans), 1)
        found.run()
        out = found.memory.tensor("attn_out")[: step.T].float().cpu()
        yield out.flatten(1), truth.outputs["attn_out"][: step.T].flatten(1)


def grouped(T: int, parts: dict[str, Any], window: int, sinks: bool) -> tuple[Program, WeightStore]:
    weights = WeightStore()
    b = Builder("gqa", {"T": T, "S": S, "R": 1})
    step_inputs(b, PAGES)
    width = (NH + 2 * KVH) * D
    b.buffer("qkv", "T", width, kind="input")
    b.buffer("angles", "T", 2, D // 2, kind="input")
    b.buffer("q", "T", NH, D)
    b.buffer("attn_out", "T", NH * D, kind="output")
    cache = {n: b.buffer(n, *p.shape, dtype=p.dtype, kind="cache") for n, p in parts.items()}
    b.node(
        "gqa_rope_cache_write",
        "write",
        {**{n: n for n in ("qkv", "angles", "slot_mapping")}, **cache},
        {"rotated": "q", **cache},
        heads=NH,
        k_start=NH * D,
        v_start=(NH + KVH) * D,
    )
    by_sequence = ("query_starts", "query_lengths", "lengths", "page_rows")
    ragged = {n: n for n in ("positions", "sequences", "page_table", *by_sequence)}
    b.node(
        "attention",
        "attention",
        {"q": "q", **cache, **ragged},
        {"out": "attn_out"},
        {"sinks": weights.add("sinks", torch.tensor([-1.0, 0.0, 1.0, 2.0]))} if sinks else {},
        heads=NH,
        kv_heads=KVH,
        dk=D,
        dv=D,
        scale=0.25,
        window=window,
    )
    return b.build(), weights


@pytest.mark.parametrize(
    ("kv_dtype", "window", "sinks", "max_chunk"),
    [("bf16", 0, False, 8), ("bf16", 12, True, 8), ("fp8", 0, False, MAX_CHUNK)],
)
def test_grouped_queries(
    kv_dtype: str,
    window: int,
    sinks: bool,
    max_chunk: int,
    pool: WorkerPool,
    device: torch.device,
) -> None:
    steps = [
        Step({3: (0, 17), 1: (0, 1), 0: (0, 5)}),  # a chunk that is not the first has one token
        Step({1: (1, 2), 0: (5, 6), 3: (17, 30), 4: (0, 9)}),
        Step({0: (6, 7), 1: (2, 3)}),  # decodes alone, of a bucket that has room for chunks
    ]
    parts = CacheSpec.grouped(kv_dtype, KVH, D).buffers(S * PAGES)
    made = grouped(max(step.T for step in steps) + 3, parts, window, sinks)
    for found, wanted in results(*made, parts, steps, pool, device, max_chunk):
        assert (found - wanted).norm() < BF16 * wanted.norm()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_latents(
    kv_dtype: str, pool: WorkerPool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.devices.cuda.binders import latents

    # One head's keys and values at a time, as where a context is long.
    monkeypatch.setattr(latents, "EXPANDED_BYTES", 1)
    steps = [Step({2: (0, 12)}), Step({0: (0, 3), 2: (12, 30), 1: (0, 5)}), Step({1: (5, 6)})]
    made = mla.program(kv_dtype, 12, pool)
    parts = CacheSpec.latent(kv_dtype, mla.L, mla.R).buffers(made[0].sizes["S"] * PAGES)
    for found, wanted in results(*made, parts, steps, pool, device, MAX_CHUNK):
        assert (found - wanted).norm() < BF16 * wanted.norm()
