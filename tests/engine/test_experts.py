"""Routers and experts as ops: the cpu device does what the ref device does, in float32."""

from __future__ import annotations

import pytest
import torch

from pykernels.quant import get_format
from pykernels.shapes import ExpertSpec, MoEShape, RouterSpec
from pykernels.testing import assert_close, random_experts
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program import Builder, Program
from runtime.program.step_inputs import allocate_inputs
from runtime.program.weights import WeightStore
from runtime.workers.pool import WorkerPool

GPT_OSS = MoEShape(E=6, H=128, I=256, topk=2, spec=ExpertSpec(1.702, 7.0, 1.0, bias=True))
SPEC = RouterSpec(2, renormalize=True, min_sum=0.5)


def program_of(shape: MoEShape, most: int) -> tuple[Program, WeightStore]:
    store = WeightStore()
    b = Builder("experts", {"T": most, "S": 1, "R": 1})
    x = b.buffer("x", "T", shape.H, kind="input")
    logits = b.buffer("logits", "T", shape.E, kind="input")
    ids = b.buffer("ids", "T", shape.topk, dtype=torch.int64)
    weights = b.buffer("weights", "T", shape.topk)
    y = b.buffer("y", "T", shape.H, kind="output")
    bias = store.add("bias", torch.linspace(-0.2, 0.2, shape.E))
    attrs = {"spec": SPEC, "experts": shape.E}
    choice = {"ids": ids, "weights": weights}
    b.node("router", "router", {"logits": logits}, choice, {"bias": bias}, **attrs)
    packed = random_experts(shape, get_format("int4"), down_fmt=get_format("q6_k"))
    experts = store.add("experts", packed)
    b.node("moe_ffn", "experts", {"x": x, **choice}, {"out": y}, {"experts": experts})
    return b.build(), store


@pytest.mark.parametrize("T", [1, 30])
def test_experts_that_are_not_here_add_nothing(T: int) -> None:
    """-1 on both devices; token 0 has no expert here, and in the second step no token has one."""
    b = Builder("experts", {"T": T, "S": 1, "R": 1})
    choice = {
        "ids": b.buffer("ids", "T", GPT_OSS.topk, dtype=torch.int64, kind="input"),
        "weights": b.buffer("weights", "T", GPT_OSS.topk, kind="input"),
    }
    x, y = (b.buffer(n, "T", GPT_OSS.H, kind=k) for n, k in (("x", "input"), ("y", "output")))
    store = WeightStore()
    experts = store.add("experts", random_experts(GPT_OSS, get_format("bf16")))
    b.node("moe_ffn", "experts", {"x": x, **choice}, {"out": y}, {"experts": experts})
    program, generator = b.build(), torch.Generator().manual_seed(T)
    inputs = allocate_inputs(program)
    inputs["x"].normal_(generator=generator)
    inputs["ids"].random_(-1, GPT_OSS.E, generator=generator)
    inputs["weights"].uniform_(generator=generator)
    inputs["ids"][0] = -1
    reference = RefExecutable(Compiled.of(on_ref(program)), store, inputs, {})
    with WorkerPool(2) as pool:
        step = CpuExecutable(program, store, pool, inputs, {}, "generic")
        for all_gone in (False, True):
            if all_gone:
                inputs["ids"][:] = -1
            for each in (step, reference):
                each.sizes[0] = T
                each.run()
            assert not step.outputs["y"][0].any()
            assert_close(step.outputs["y"], reference.outputs["y"], 6e-3)
        assert not step.outputs["y"].any()


@pytest.mark.parametrize("T", [1, 30])
def test_the_cpu_device_does_what_ref_does(T: int) -> None:
    """Down in another format, biases, a clamped activation, a smallest sum of weights."""
    program, store = program_of(GPT_OSS, T)
    generator = torch.Generator().manual_seed(T)
    inputs = {
        "x": 3 * torch.randn(T, GPT_OSS.H, generator=generator).bfloat16().float(),
        "logits": torch.randn(T, GPT_OSS.E, generator=generator),
    }
    reference = RefExecutable(Compiled.of(on_ref(program)), store, inputs, {})
    with WorkerPool(2) as pool:
        step = CpuExecutable(program, store, pool, inputs, {}, "generic")
        for each in (step, reference):
            each.sizes[0] = T
            each.run()
        assert_close(step.outputs["y"], reference.outputs["y"], 6e-3)
