"""Deferral and skipping as programs, against a plain forward in float64 that does the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from pykernels.errors import PykernelsError
from pykernels.ref.router import split_routing
from runtime.devices.cpu.step import CpuStep
from runtime.devices.host.runner import on_host
from runtime.devices.host.step import HostStep
from runtime.passes import defer, fewest_deferred, skip
from runtime.passes.layers import moe_layers
from runtime.program import Program

from ..model import tiny

T = 8
FAMILIES = ("deepseek_v3", "qwen2_moe", "glm4_moe")  # 3 experts of a token


@contextmanager
def changed(lm: Any, N: int, deferred: bool) -> Iterator[None]:
    """Transformers' model with N experts of a token skipped, or deferred by one layer."""
    blocks = [layer.mlp.experts for layer in lm.model.layers if hasattr(layer.mlp, "experts")]
    late: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        x, ids, weights = (*args, *kwargs.values())
        order = weights.sort(dim=-1, descending=True, stable=True).indices
        first, rest = order[:, :-N], order[:, -N:]

        def experts(at: torch.Tensor) -> torch.Tensor:
            return module.forward(x, ids.gather(1, at), weights.gather(1, at))

        if not deferred:
            return experts(first)
        joined = late.pop() if late else torch.zeros_like(output)
        if module is blocks[-1]:
            return output + joined
        late.append(experts(rest))
        return experts(first) + joined

    hooks = [block.register_forward_hook(hook, with_kwargs=True) for block in blocks]
    yield
    for one in hooks:
        one.remove()


def run(llm: Any, program: Program, device: str) -> torch.Tensor:
    """Logits [T, V] of T tokens of one sequence."""
    inputs = {
        "tokens": torch.arange(20, 20 + T), "positions": torch.arange(T),
        "slots": torch.arange(T), "sequences": torch.zeros(T, dtype=torch.int64),
        "sampled": torch.arange(T), "page_table": torch.zeros(1, 1, dtype=torch.int64),
    }  # fmt: skip
    host = device == "host"
    caches = {name: part.zeros() for name, part in llm.runner.model.caches(1).items()}
    if host:
        caches = {name: pages.float() for name, pages in caches.items()}
    step: Any
    step = (
        HostStep(on_host(program), inputs, caches)
        if host
        else CpuStep(program, llm.pool, inputs, caches)
    )
    step.sizes[:] = torch.tensor([T, 1, T])
    step.run()
    return step.outputs["logits"]


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
    with model.load_engine(tmp_path, context=64, threads=1) as llm:
        program = llm.runner.model.lower(T, 1, T, 1, 1)
        for rewrite, deferred in ((defer, True), (skip, False)):
            with changed(lm, 1, deferred):
                wanted = truth()
            moved = (wanted - plain).norm()
            assert moved > 0.1 * plain.norm()
            assert (run(llm, rewrite(program, 1), "host") - wanted).norm() < 1e-4 * moved
            error = (run(llm, rewrite(program, 1), "cpu") - wanted).norm(dim=-1)
            assert error.median() < 0.05 * wanted.norm(dim=-1).median()


def test_what_is_deferred_and_what_is_not(tmp_path: Path) -> None:
    tiny.make(tmp_path, "deepseek_v3", num_hidden_layers=5, num_experts_per_tok=4)
    program = model.llm.outline_decoder(tmp_path).lower(T, 1, T, 1, 1)
    assert defer(program, 0) is program and skip(program, 0) is program
    late = defer(program, 2)
    names = [node.name for node in late.nodes if node.name.endswith("deferred")]
    assert names == [f"layer{i}.experts.deferred" for i in (1, 2, 3)]  # not the last, 4
    assert len(moe_layers(program)) == 4
    joins = {n: node.name for node in late.nodes for n in node.inputs if n.endswith("deferred")}
    assert joins["layer1.routed.deferred"] == "layer3.input_norm"
    assert joins["layer3.routed.deferred"] == "norm"
    for rewrite in (defer, skip):
        assert rewrite(program, 3, least=1)
        with pytest.raises(PykernelsError, match="Use 0 to 2"):
            rewrite(program, 3)


def test_as_few_are_deferred_as_keep_the_cpu_busy() -> None:
    assert fewest_deferred(8, expert_s=1.0, other_s=2.5) == 3
    assert fewest_deferred(8, expert_s=1.0, other_s=20.0) == 6  # two stay
    assert fewest_deferred(8, expert_s=1.0, other_s=0.0) == 0  # nothing to overlap with


def test_equal_weights_are_split_in_their_order() -> None:
    ids, weights = torch.tensor([[7, 3, 5, 1]]), torch.tensor([[0.5, 0.25, 0.5, 0.25]])
    found = [part.tolist() for part in split_routing(ids, weights, 1)]
    assert found == [[[7, 5, 3]], [[0.5, 0.5, 0.25]], [[1]], [[0.25]]]
