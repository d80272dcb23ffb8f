"""Latent attention with expanded keys and values, by both devices, beside the absorbed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pykernels.cpu.attention.expanded import Expanded
from pykernels.quant import PackedHeads, get_format
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.kv_cache.layout import CacheSpec
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program import Builder, Program
from runtime.program.weights import WeightStore
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ..cpu.kernels import only_with_all

NH, L, R, NOPE, DV, FROM = 3, 32, 16, 16, 16, 60  # heads of the tiny models: compiled once
STEPS = (
    {0: (0, 100)},
    {1: (0, 5), 0: (100, 170), 2: (0, FROM)},  # behind a prefix, and with too few tokens
)
"""Each step's positions of each sequence's tokens."""
T = max(sum(last - first for first, last in step.values()) for step in STEPS)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


def program(kv_dtype: str, expand_from: int, pool: WorkerPool) -> tuple[Program, WeightStore]:
    store = WeightStore()
    b, g = Builder("mla", {"T": T, "S": 3, "R": 1}), torch.Generator().manual_seed(5)
    fmt = get_format("bf16")
    uk, uv = (
        store.add(
            name,
            PackedHeads.of(
                fmt,
                [fmt.quantize(torch.randn(*shape, generator=g) / 6) for _ in range(NH)],
                packer(pool),
            ),
        )
        for name, shape in (("uk", (L, NOPE)), ("uv", (DV, L)))
    )
    for name in ("positions", "sequences", "slot_mapping"):
        b.buffer(name, "T", dtype=torch.int64, kind="input")
    b.buffer("page_table", "S", 3, dtype=torch.int64, kind="input")
    b.buffer("angles", "T", 2, R // 2, kind="input")
    b.buffer("q", "T", NH * (NOPE + R), kind="input")
    b.buffer("kv", "T", L + R, kind="input")
    cache = {
        name: b.buffer(name, *part.shape, dtype=part.dtype, kind="cache")
        for name, part in CacheSpec.latent(kv_dtype, L, R).buffers(9).items()
    }
    b.buffer("rotated", "T", NH, L + R)
    b.buffer("latents", "T", NH, L)
    b.buffer("attn_out", "T", NH * DV, kind="output")
    b.node(
        "mla_rope_cache_write",
        "write",
        {**{n: n for n in ("q", "kv", "angles", "slot_mapping")}, **cache},
        {"rotated": "rotated", **cache},
        {"kv_norm": store.add("norm", torch.ones(L))},
        nope=NOPE,
        heads=NH,
        eps=1e-6,
        interleaved=1,
    )
    b.node(
        "per_head_linear",
        "uk",
        {"x": "q", "out": "rotated", "sequences": "sequences"},
        {"out": "rotated"},
        {"heads": uk},
        x_head=NOPE + R,
        out_head=L + R,
        expand_from=expand_from,
    )
    ragged = {name: name for name in ("positions", "sequences", "page_table")}
    read = {"q": "rotated", **ragged, **cache}
    attrs = {"heads": NH, "scale": 0.15, "expand_from": expand_from}
    b.node("attention", "attention", read, {"out": "latents"}, kv_heads=1, dk=L + R, dv=L, **attrs)
    b.node(
        "per_head_linear",
        "uv",
        {"x": "latents", "sequences": "sequences"},
        {"out": "attn_out"},
        {"heads": uv},
        x_head=L,
        out_head=DV,
        expand_from=expand_from,
    )
    b.node(
        "attention_expanded",
        "expanded",
        {**read, "q_nope": "q", "out": "attn_out"},
        {"out": "attn_out"},
        {"uk": uk, "uv": uv},
        nope=NOPE,
        dv=DV,
        **attrs,
    )
    return b.build(), store


def run(
    kv_dtype: str,
    device: str,
    expand_from: int,
    pool: WorkerPool,
    steps: Sequence[dict[int, tuple[int, int]]] = STEPS,
    seeds: Sequence[int] = (1, 2),
    shared: int = 0,
) -> list[torch.Tensor]:
    """What each step's tokens get, of inputs from the step's seed; ``shared`` pages of sequence 0
    are those of sequence 1 too."""
    (made, store), g = program(kv_dtype, expand_from, pool), torch.Generator().manual_seed(8)
    inputs = {
        name: torch.zeros(made.shape(name), dtype=buffer.dtype)
        for name, buffer in made.buffers.items()
        if buffer.kind == "input"
    }
    inputs["page_table"][:] = torch.randperm(9, generator=g).view(3, 3)
    inputs["page_table"][1, :shared] = inputs["page_table"][0, :shared]
    parts = CacheSpec.latent(kv_dtype, L, R).buffers(9)
    caches = {name: part.zeros() for name, part in parts.items()}
    step: Any
    if device == "cpu":
        step = CpuExecutable(made, store, pool, inputs, caches)
    else:
        caches = {n: x.float() if x.dtype == torch.bfloat16 else x for n, x in caches.items()}
        step = RefExecutable(Compiled.of(on_ref(made)), store, inputs, caches)
    found = []
    for sequences, seed in zip(steps, seeds, strict=True):
        t = 0
        g.manual_seed(seed)
        for sequence, (first, last) in sequences.items():
            at, positions = slice(t, t + last - first), torch.arange(first, last)
            inputs["sequences"][at], inputs["positions"][at] = sequence, positions
            pages = inputs["page_table"][sequence][positions // 64]
            inputs["slot_mapping"][at] = pages * 64 + positions % 64
            t += last - first
        for name in ("q", "kv"):
            inputs[name].normal_(generator=g)
        angles = torch.rand(T, R // 2, generator=g)
        inputs["angles"][:] = torch.stack([angles.cos(), angles.sin()], 1)
        step.sizes[:] = torch.tensor([t, 3, 1])
        step.run()
        found.append(step.outputs["attn_out"][:t].clone())
    return found


@pytest.mark.parametrize("kv_dtype", ["bf16", pytest.param("fp8", marks=only_with_all)])
def test_expanded_is_the_reference(kv_dtype: str, pool: WorkerPool) -> None:
    found = run(kv_dtype, "cpu", FROM, pool)
    for y, wanted in zip(found, run(kv_dtype, "ref", FROM, pool), strict=True):
        assert (y - wanted).norm() < 0.005 * wanted.norm()  # of keys in bfloat16, and its queries
    for y, absorbed in zip(found, run(kv_dtype, "cpu", 1 << 30, pool), strict=True):
        assert 0 < (y - absorbed).norm() < 0.01 * absorbed.norm()


def test_same_bits_on_any_threads_and_behind_a_prefix(pool: WorkerPool) -> None:
    steps = {0: (0, 64)}, {0: (64, 170)}, {1: (64, 170)}  # 1 finds the first page in the cache
    found = run("bf16", "cpu", FROM, pool, steps, (1, 2, 2), shared=1)
    assert torch.equal(found[1], found[2])
    with WorkerPool(1) as single:
        alone = run("bf16", "cpu", FROM, single, steps, (1, 2, 2), shared=1)
    assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


def test_steps_of_few_tokens_need_no_kernel(pool: WorkerPool, monkeypatch: Any) -> None:
    monkeypatch.setattr(Expanded, "compile", lambda self: pytest.fail("compiled"))
    run("bf16", "cpu", FROM, pool, [{0: (0, 5), 1: (0, FROM - 6)}], [1])
