"""Deferral and skipping as programs, against a plain forward in float64 that does the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from pykernels.errors import PykernelsError
from pykernels.ref.router import split_routing
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.step import RefExecutable
from runtime.passes import (
    defer,
    gpu_experts,
    offload,
    skip,
    split_experts,
    stream_weights,
)
from runtime.passes.gpu_experts import expert_slot_tables
from runtime.passes.layers import moe_layers
from runtime.passes.on_ref import on_ref
from runtime.passes.stream_weights import StreamRing
from runtime.planning.compile import Compiled
from runtime.planning.lowerable import Pass
from runtime.program import Program
from runtime.program.analysis import on_streams
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs

from ..model import tiny

T = 8
FAMILIES = ("deepseek_v3", "qwen2_moe", "glm4_moe")  # 3 experts of a token


def smallest(weights: torch.Tensor, among: torch.Tensor, count: int) -> torch.Tensor:
    """Of each token, the ``count`` smallest weights where ``among`` is set, as a mask."""
    order = weights.masked_fill(~among, -1).sort(dim=-1, descending=True, stable=True).indices
    return among & (order.argsort(-1) >= among.sum(-1, keepdim=True) - count)


@contextmanager
def changed(lm: Any, deferred: int = 0, skipped: int = 0, prompt: int = 0) -> Iterator[None]:
    """Transformers' model with the experts of a token's smallest weights skipped, and with those of
    the smallest that are left deferred by one layer, but for so many first tokens."""
    blocks = [layer.mlp.experts for layer in lm.model.layers if hasattr(layer.mlp, "experts")]
    late: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        x, ids, weights = (*args, *kwargs.values())

        def experts(mask: torch.Tensor) -> torch.Tensor:
            return module.forward(x, ids, weights * mask)

        stay = ~smallest(weights, torch.ones_like(ids, dtype=torch.bool), skipped)
        later = smallest(weights, stay, 0 if module is blocks[-1] else deferred)
        later[:prompt] = False
        joined = late.pop() if late else torch.zeros_like(output)
        if later.any():
            late.append(experts(later))
        return experts(stay & ~later) + joined

    hooks = [block.register_forward_hook(hook, with_kwargs=True) for block in blocks]
    yield
    for one in hooks:
        one.remove()


def run(
    llm: Any,
    program: Program,
    device: str,
    tables: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Logits [T, V] of T tokens of one sequence; on the ref device of a program that is there."""
    step = executable(llm, program, device, tables, **options)
    step.run()
    return step.outputs["logits"]


def executable(
    llm: Any,
    program: Program,
    device: str = "ref",
    tables: Mapping[str, torch.Tensor] | None = None,
    prompt: int = 0,
    **options: Any,
) -> Any:
    """The step of ``run``; the first tokens are a prompt's, the others an output's."""
    inputs = allocate_inputs(program) | {
        "tokens": torch.arange(20, 20 + T),
        "positions": torch.arange(T),
        "slot_mapping": torch.arange(T),
        "logits_indices": torch.arange(T),
        "is_prompt": (torch.arange(T) < prompt).long(),
    }
    reference = device == "ref"
    caches = {name: part.zeros() for name, part in llm.runner.model.caches(1).items()}
    if reference:
        caches = {name: pages.float() for name, pages in caches.items()}
    caches |= tables or expert_slot_tables(program)
    step: Any
    step = (
        RefExecutable(Compiled.of(program), llm.runner.weights, inputs, caches, **options)
        if reference
        else CpuExecutable(program, llm.runner.weights, llm.pool, inputs, caches)
    )
    step.sizes[:] = torch.tensor([T, 1, T])
    return step


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_do_what_a_plain_forward_does(family: str, tmp_path: Path) -> None:
    made = tiny.make(tmp_path, family, num_hidden_layers=4)
    lm = made.reference.double()
    lm.set_experts_implementation("eager")
    ids = torch.arange(20, 20 + T)[None]

    def truth() -> torch.Tensor:
        with torch.no_grad():
            return lm(ids).logits[0]

    plain = truth()
    with model.load_engine(tmp_path, max_model_len=64, threads=1) as llm:
        program = llm.runner.model.lower(StepSizes(T, 1, T, 1, 1))
        here = on_ref(program)
        for rewrite, name, prompt in (
            (defer, "deferred", 0),
            (defer, "deferred", 3),
            (skip, "skipped", 0),
        ):
            with changed(lm, **{name: 1}, prompt=prompt):
                wanted = truth()
            moved = (wanted - plain).norm()
            assert moved > (0.05 if prompt else 0.1) * plain.norm()
            exact = run(llm, rewrite(here, 1), "ref", prompt=prompt)
            assert (exact - wanted).norm() < 1e-4 * moved
            error = (run(llm, rewrite(program, 1), "cpu", prompt=prompt) - wanted).norm(dim=-1)
            assert error.median() < 0.05 * wanted.norm(dim=-1).median()


IN_SLOTS = (0, 3, 6)  # of eight


def in_slots(program: Program) -> Program:
    """Some experts of every layer beside the others."""
    layers = [layer.experts.layer for layer in moe_layers(program)]
    return gpu_experts(program, {layer: IN_SLOTS for layer in layers if layer is not None})


def streamed(program: Program) -> Program:
    """Experts in three pieces a layer, in two buffers."""
    return stream_weights(program, lambda spec: spec.nbytes, StreamRing(3, 2))


PASSES: dict[str, Pass] = {
    "defer": lambda p: defer(p, 1),
    "gpu_experts": in_slots,
    "skip": lambda p: skip(p, 1),
    "offload": offload,
    "stream_weights": streamed,
    "split_experts": lambda p: split_experts(p, 0.4, lambda spec: spec.nbytes, StreamRing(3, 2)),
}
PAIRS: dict[tuple[str, str], dict[str, Any] | str] = {
    ("defer", "defer"): {"deferred": 2},
    ("defer", "skip"): "Apply skip before defer",
    ("defer", "offload"): {"deferred": 1},
    ("skip", "defer"): {"skipped": 1, "deferred": 1},
    ("skip", "skip"): {"skipped": 2},
    ("skip", "offload"): {"skipped": 1},
    ("offload", "defer"): {"deferred": 1},
    ("offload", "skip"): {"skipped": 1},
    ("offload", "offload"): {},
    ("gpu_experts", "defer"): {"deferred": 1},  # wherever an expert is
    ("gpu_experts", "skip"): "Apply skip before gpu_experts",
    ("gpu_experts", "offload"): {},
    ("gpu_experts", "gpu_experts"): "once",
    ("defer", "gpu_experts"): "before defer",
    ("skip", "gpu_experts"): {"skipped": 1},
    ("offload", "gpu_experts"): {},
    ("stream_weights", "defer"): {"deferred": 1},
    ("stream_weights", "skip"): {"skipped": 1},
    ("stream_weights", "offload"): "Apply offload before",
    ("stream_weights", "gpu_experts"): "Apply gpu_experts before",
    ("stream_weights", "stream_weights"): "once",
    ("defer", "stream_weights"): "Apply stream_weights before defer",
    ("skip", "stream_weights"): {"skipped": 1},
    ("gpu_experts", "stream_weights"): {},
    ("offload", "stream_weights"): {},
    ("split_experts", "defer"): {"deferred": 1},
    ("split_experts", "skip"): "Apply skip before split_experts",
    ("split_experts", "offload"): "Apply offload before",
    ("split_experts", "gpu_experts"): "once",
    ("split_experts", "stream_weights"): "once",
    ("split_experts", "split_experts"): "once",
    ("defer", "split_experts"): "before",
    ("skip", "split_experts"): {"skipped": 1},
    ("gpu_experts", "split_experts"): "once",
    ("offload", "split_experts"): {},
    ("stream_weights", "split_experts"): "once",
}
"""What two passes in a row are, or why they are refused."""


@pytest.fixture(scope="module")
def four_experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An engine, and transformers' model of four experts of a token in float64."""
    path = tmp_path_factory.mktemp("four")
    made = tiny.make(path, "deepseek_v3", num_hidden_layers=4, num_experts_per_tok=4)
    lm = made.reference.double()
    lm.set_experts_implementation("eager")
    with model.load_engine(path, max_model_len=64, threads=1, kernel="generic") as llm:
        yield llm, lm


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_passes_in_a_row(pair: tuple[str, str], four_experts: tuple[Any, Any]) -> None:
    llm, lm = four_experts
    first, second = (PASSES[name] for name in pair)
    program, wanted = on_ref(llm.runner.model.lower(StepSizes(T, 1, T, 1, 1))), PAIRS[pair]
    if isinstance(wanted, str):
        with pytest.raises(PykernelsError, match=wanted):
            second(first(program))
        return
    with changed(lm, **wanted), torch.no_grad():
        truth = lm(torch.arange(20, 20 + T)[None]).logits[0]
    logits = run(llm, second(first(program)), "ref", pool=llm.pool, kernel="generic")
    # What is offloaded runs on the real kernels, with bfloat16 inputs.
    bound = 0.02 if "offload" in pair else 1e-4
    assert (logits - truth).norm() < bound * truth.norm()
    assert torch.equal(logits.argmax(-1), truth.argmax(-1)) or "offload" in pair


@pytest.mark.parametrize(("device", "bound"), [("ref", 1e-4), ("cpu", 0.02)])
def test_what_is_in_slots_may_change_between_steps(
    device: str, bound: float, four_experts: tuple[Any, Any]
) -> None:
    llm, lm = four_experts
    program = in_slots(llm.runner.model.lower(StepSizes(T, 1, T, 1, 1)))
    with torch.no_grad():
        truth = lm(torch.arange(20, 20 + T)[None]).logits[0]
    tables = expert_slot_tables(program)
    assert [table.tolist() for table in tables.values()] == [[0, -1, -1, 1, -1, -1, 2, -1]] * 3
    here = on_ref(program) if device == "ref" else program
    for lost in (None, 3):
        for table in tables.values():
            table[[] if lost is None else lost] = -1
        error = (run(llm, here, device, tables) - truth).norm(dim=-1)
        assert error.median() < bound * truth.norm(dim=-1).median()
    for table in tables.values():  # the wrong experts: it is the table that is followed
        table[3] = 2
    assert (run(llm, here, device, tables) - truth).norm() > 0.1 * truth.norm()


@pytest.mark.parametrize("ring", [StreamRing(1, 2), StreamRing(3, 2), StreamRing(8, 9)], ids=str)
def test_loads_run_ahead_of_what_they_are_for(
    ring: StreamRing, four_experts: tuple[Any, Any]
) -> None:
    """As early as the order of nodes that share a buffer allows, over the memory of that plan."""
    llm, lm = four_experts
    program = on_ref(llm.runner.model.lower(StepSizes(T, 1, T, 1, 1)))
    with torch.no_grad():
        truth = lm(torch.arange(20, 20 + T)[None]).logits[0]
    program = stream_weights(program, lambda spec: spec.nbytes, ring)
    order, left, early = on_streams(program), list(range(len(program.nodes))), list[int]()
    while left:
        ready = [i for i in left if not set(order.direct[i]) - set(early)]
        loads = [i for i in ready if program.nodes[i].op == "load_experts"]
        early.append((loads or ready)[0])
        left.remove(early[-1])
    names = [program.nodes[i].name for i in early]
    if ring.buffers > ring.chunks:  # the next layer's, all of them, beside this layer's experts
        assert names.index("layer2.experts.load0") < names.index("layer1.experts")
    step = executable(llm, program)
    step.here = replace(program, nodes=tuple(program.nodes[i] for i in early))
    step.run()
    assert (step.outputs["logits"] - truth).norm() < 1e-4 * truth.norm()


def test_one_layer_is_streamed_and_the_others_are_on_the_cpu(
    four_experts: tuple[Any, Any],
) -> None:
    llm, lm = four_experts
    program = offload(on_ref(llm.runner.model.lower(StepSizes(T, 1, T, 1, 1))))
    program = stream_weights(program, lambda spec: spec.nbytes, StreamRing(3, 2), layers={2})
    devices = [node.device for node in program.nodes if node.role == "routed"]
    assert devices == ["cpu", "ref", "cpu"]
    with torch.no_grad():
        truth = lm(torch.arange(20, 20 + T)[None]).logits[0]
    logits = run(llm, program, "ref", pool=llm.pool, kernel="generic")
    assert (logits - truth).norm() < 0.02 * truth.norm()


def test_experts_that_there_are_not(four_experts: tuple[Any, Any]) -> None:
    program = four_experts[0].runner.model.lower(StepSizes(T, 1, T, 1, 1))
    for wrong in ((1, 8), (2, 2)):
        with pytest.raises(PykernelsError, match="Give each of 0 to 7 once at most"):
            gpu_experts(program, {1: wrong})
    with pytest.raises(PykernelsError, match="layer 0 of .* has no routed experts"):
        gpu_experts(program, {0: (1,)})


def test_what_is_deferred_and_what_is_not(tmp_path: Path) -> None:
    tiny.make(tmp_path, "deepseek_v3", num_hidden_layers=5, num_experts_per_tok=4)
    program = model.llm.meta_decoder(tmp_path).lower(StepSizes(T, 1, T, 1, 1))
    assert defer(program, 0) is program and skip(program, 0) is program
    late = defer(program, 2)
    names = [node.name for node in late.nodes if node.role == "deferred"]
    assert names == [f"layer{i}.experts.deferred" for i in (1, 2, 3)]  # not the last, 4
    assert len(moe_layers(program)) == 4
    late_sums = {out for node in late.nodes if node.role == "deferred" for out in node.writes}
    joins = {n: node.name for node in late.nodes for n in node.reads if n in late_sums}
    assert joins["layer1.routed.deferred"] == "layer3.input_norm"
    assert joins["layer3.routed.deferred"] == "norm"
    for rewrite in (defer, skip):
        assert rewrite(program, 3, least=1)
        with pytest.raises(PykernelsError, match="Use 0 to 2"):
            rewrite(program, 3)


def test_equal_weights_are_split_in_their_order() -> None:
    ids, weights = torch.tensor([[7, 3, 5, 1]]), torch.tensor([[0.5, 0.25, 0.5, 0.25]])
    parts = [part.tolist() for part in split_routing(ids, weights, 1)]
    assert parts == [[[7, 3, 5, -1]], [[-1, -1, -1, 1]]]
    parts = [part.tolist() for part in split_routing(torch.tensor([[7, 3, -1, -1]]), weights, 1)]
    assert parts == [[[7, -1, -1, -1]], [[-1, 3, -1, -1]]]
