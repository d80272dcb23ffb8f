"""Jobs that wait only for what they read: the same bits as one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import model
from pykernels.errors import PykernelsError
from pykernels.quant import PackedMatrix, get_format
from pykernels.shapes import RouterSpec
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program import Builder, Program, repeated
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs
from runtime.program.weights import WeightStore
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from ...model import tiny

T, H = 8, 64


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])  # a shared expert, one with a gate
def test_a_step_is_the_same_bits_in_any_order(family: str, tmp_path: Path) -> None:
    tiny.make(tmp_path, family)
    with model.load_engine(tmp_path, max_model_len=64, kernel="generic") as llm:
        lowered = llm.runner.model
        program = lowered.lower(StepSizes(T, 1, T, 1, 1))
        steps = []
        for in_order in (True, False):
            inputs = allocate_inputs(program) | {
                "positions": torch.arange(T),
                "slot_mapping": torch.arange(T),
                "logits_indices": torch.arange(T),
            }
            caches = {name: part.zeros() for name, part in lowered.caches(1).items()}
            step = CpuExecutable(
                program, lowered.store, llm.pool, inputs, caches, "generic", in_order=in_order
            )
            step.sizes[:] = torch.tensor([T, 1, T])
            steps.append((step, inputs["tokens"]))
        for seed in range(20):
            for step, tokens in steps:
                generator = torch.Generator().manual_seed(seed)
                tokens[:] = torch.randint(2, 96, (T,), generator=generator)
                step.run()
            assert torch.equal(*(step.outputs["logits"] for step, _ in steps))
    jobs = {job.name: (i, job) for i, job in enumerate(steps[1][0].jobs.jobs)}
    names = [job.name for job in steps[1][0].jobs.jobs]

    def waits(name: str) -> set[str]:
        at, job = jobs[name]
        return {names[at - distance] for distance in job.after}

    last = max(int(name[5:].split(".")[0]) for name in names if name.startswith("layer"))
    shared, routed = f"layer{last}.shared", f"layer{last}.experts"
    assert routed not in waits(shared) and f"layer{last}.router" not in waits(shared)
    assert waits("norm") == {shared, routed} and waits(routed) == {f"layer{last}.router"}


def sums(count: int, pool: WorkerPool) -> tuple[Program, WeightStore]:
    """The norm of x and ``count`` addends, by a matrix."""
    store = WeightStore()
    b, g = Builder("sums", {"T": T, "S": 1, "R": 1}), torch.Generator().manual_seed(count)
    adds = [b.buffer(f"in{i}", "T", H, kind="input") for i in range(count)]
    b.buffer("x", "T", H, kind="input")
    b.buffer("normed", "T", H)
    b.buffer("sum", "T", H, kind="output")
    b.buffer("y", "T", 32, kind="output")
    b.node(
        "rms_norm",
        "norm",
        {"x": "x", **repeated("add", adds)},
        {"out": "normed", "sum": "sum"},
        {"weight": store.add("norm", torch.rand(H, generator=g) + 0.5)},
        eps=1e-6,
    )
    fmt = get_format("bf16")
    weight = fmt.quantize(torch.randn(32, H, generator=g) / 8)
    matrix = store.add("matrix", PackedMatrix.of(fmt, [weight], packer(pool)))
    b.node("linear", "linear", {"x": "normed"}, {"out": "y"}, {"weight": matrix})
    return b.build(), store


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6])
def test_a_norm_adds_up_any_number(count: int) -> None:
    with WorkerPool(1) as pool:
        program, store = sums(count, pool)
        inputs = {
            name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i))
            for i, (name, tensor) in enumerate(allocate_inputs(program).items())
        }
        steps = (
            CpuExecutable(program, store, pool, inputs, {}, "generic"),
            RefExecutable(Compiled.of(on_ref(program)), store, inputs, {}),
        )
        for step in steps:
            step.sizes[0] = T
            step.run()
        cpu, reference = (step.outputs for step in steps)
    exact = sum(tensor.double() for tensor in inputs.values())
    assert torch.allclose(cpu["sum"].double(), exact, atol=1e-5)
    assert (cpu["y"] - reference["y"]).norm() < 0.01 * reference[
        "y"
    ].norm()  # of inputs in bfloat16


def test_floats_of_a_norm_are_refused() -> None:
    """They exist as packed activations only: reading them gave old bytes."""
    b = Builder("floats", {"T": T, "S": 1, "R": 1})
    b.buffer("x", "T", H, kind="input")
    b.buffer("normed", "T", H)
    b.buffer("y", "T", H, kind="output")
    store = WeightStore()
    weight = {"weight": store.add("ones", torch.ones(H))}
    b.node("rms_norm", "first", {"x": "x"}, {"out": "normed"}, weight, eps=1e-6)
    with WorkerPool(1) as pool:
        with pytest.raises(PykernelsError, match="output 'y' of 'floats' is what a norm writes"):
            b.node("rms_norm", "second", {"x": "x"}, {"out": "y"}, weight, eps=1e-6)
            CpuExecutable(b.build(), store, pool, {"x": torch.zeros(T, H)}, {})
        c = Builder("floats", {"T": T, "S": 1, "R": 1})
        c.buffer("x", "T", H, kind="input")
        c.buffer("normed", "T", H)
        c.buffer("ids", "T", 2, dtype=torch.int64, kind="output")
        c.buffer("weights", "T", 2, kind="output")
        c.node("rms_norm", "norm", {"x": "x"}, {"out": "normed"}, weight, eps=1e-6)
        choice = {"ids": "ids", "weights": "weights"}
        spec = RouterSpec(2)
        c.node("router", "router", {"logits": "normed"}, choice, spec=spec, experts=H)
        with pytest.raises(PykernelsError, match="router reads 'normed' as floats"):
            CpuExecutable(c.build(), store, pool, {"x": torch.zeros(T, H)}, {})
        with pytest.raises(PykernelsError, match="the input 'x' of 'floats' is not given"):
            CpuExecutable(c.build(), store, pool, {}, {})
