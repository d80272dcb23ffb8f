"""Writing the cache and attention over it, by both devices, in bfloat16 and in E4M3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pykernels.errors import PykernelsError
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.kv_cache.layout import CachePart, CacheSpec
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program import Builder, Program
from runtime.program.weights import WeightStore
from runtime.workers.pool import WorkerPool

T, NH, KVH, D, L, R = 70, 4, 2, 16, 32, 16  # heads of the tiny models: compiled once
BF16, E4M3 = 0.004, 0.04
"""Norms of errors over norms: keys and values of random numbers, all of a size, in each form."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(1)
    yield made
    made.close()


def program(kind: str, kv_dtype: str) -> tuple[Program, WeightStore, dict[str, CachePart]]:
    store = WeightStore()
    b = Builder(kind, {"T": T, "S": 1, "R": 1})
    latent, g = kind == "mla", torch.Generator().manual_seed(7)
    spec = CacheSpec.latent(kv_dtype, L, R) if latent else CacheSpec.grouped(kv_dtype, KVH, D)
    parts = spec.buffers(2)
    width = L + R if latent else D
    for name in ("positions", "sequences", "slot_mapping"):
        b.buffer(name, "T", dtype=torch.int64, kind="input")
    b.buffer("page_table", "S", 2, dtype=torch.int64, kind="input")
    b.buffer("angles", "T", 2, R // 2, kind="input")
    names = {
        name: b.buffer(name, *part.shape, dtype=part.dtype, kind="cache")
        for name, part in parts.items()
    }
    q = b.buffer("rotated", "T", NH, width)
    if latent:
        b.buffer("q", "T", NH * (D + R), kind="input")
        b.buffer("kv", "T", L + R, kind="input")
        b.node(
            "mla_rope_cache_write",
            "write",
            {"q": "q", "kv": "kv", "angles": "angles", "slot_mapping": "slot_mapping", **names},
            {"rotated": q, **names},
            {"kv_norm": store.add("norm", torch.rand(L, generator=g) + 0.5)},
            nope=D,
            heads=NH,
            eps=1e-6,
            interleaved=1,
        )
    else:
        b.buffer("q", "T", (NH + 2 * KVH) * D, kind="input")
        b.node(
            "gqa_rope_cache_write",
            "write",
            {"qkv": "q", "angles": "angles", "slot_mapping": "slot_mapping", **names},
            {"rotated": q, **names},
            heads=NH,
            k_start=NH * D,
            v_start=(NH + KVH) * D,
        )
    b.buffer("out", "T", NH, L if latent else D, kind="output")
    b.node(
        "attention",
        "attention",
        {"q": q, **{n: n for n in ("positions", "sequences", "page_table")}, **names},
        {"out": "out"},
        {} if latent else {"sinks": store.add("sinks", torch.randn(NH, generator=g))},
        heads=NH,
        kv_heads=1 if latent else KVH,
        dk=width,
        dv=L if latent else D,
        scale=0.2,
        window=0 if latent else 50,
    )
    return b.build(), store, parts


def run(kind: str, kv_dtype: str, device: str, pool: WorkerPool) -> tuple[torch.Tensor, dict]:
    """What T tokens of one sequence attend to, and the cache behind it."""
    made, store, parts = program(kind, kv_dtype)
    g = torch.Generator().manual_seed(8)
    angles = torch.rand(T, R // 2, generator=g)
    inputs = {
        "positions": torch.arange(T),
        "sequences": torch.zeros(T, dtype=torch.int64),
        "slot_mapping": torch.arange(T),
        "page_table": torch.tensor([[0, 1]]),
        "angles": torch.stack([angles.cos(), angles.sin()], 1),
    }
    for name in ("q", "kv"):
        if name in made.buffers:
            inputs[name] = torch.randn(made.shape(name), generator=g)
    caches = {name: part.zeros() for name, part in parts.items()}
    step: Any
    if device == "cpu":
        step = CpuExecutable(made, store, pool, inputs, caches)
    else:
        exact = {torch.bfloat16: torch.float32}
        caches = {name: x.to(exact.get(x.dtype, x.dtype)) for name, x in caches.items()}
        step = RefExecutable(Compiled.of(on_ref(made)), store, inputs, caches)
    step.sizes[:] = torch.tensor([T, 1, 1])
    step.run()
    return step.outputs["out"].clone(), caches


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_both_devices_attend_alike_and_e4m3_is_near_bfloat16(kind: str, pool: WorkerPool) -> None:
    exact, _ = run(kind, "bf16", "ref", pool)
    for kv_dtype, bound in (("bf16", BF16), ("fp8", E4M3)):
        found, pages = run(kind, kv_dtype, "cpu", pool)
        assert bound / 4 < (found - exact).norm() / exact.norm() < bound
    wanted, others = run(kind, "fp8", "ref", pool)
    # A latent's norm may round otherwise, and so a number that lies between two codes.
    same = torch.stack(
        [
            (pages[name].view(torch.uint8) == others[name].view(torch.uint8)).float().mean()
            for name in pages
            if pages[name].dtype == torch.float8_e4m3fn
        ]
    )
    assert (same == 1).all() if kind == "gqa" else same.min() > 0.998
    assert (found - wanted).norm() < (1e-5 if kind == "gqa" else 4e-3) * wanted.norm()


def test_e4m3_takes_half_the_memory() -> None:
    sizes = [CacheSpec.latent(kv_dtype, 512, 64).token_bytes for kv_dtype in ("bf16", "fp8")]
    assert sizes == [1152, 512 + 128 + 4]
    sizes = [CacheSpec.grouped(kv_dtype, 4, 128).token_bytes for kv_dtype in ("bf16", "fp8")]
    assert sizes == [2048, 1024 + 32]
    with pytest.raises(PykernelsError, match="int8"):
        CacheSpec.grouped("int8", 4, 128)
