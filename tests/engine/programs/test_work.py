"""What a step computes, against what torch counts in transformers' own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.llm import meta_decoder
from runtime.planning.compile import compile
from runtime.planning.execution import ExecutionPlan, Phase
from runtime.planning.placement import Placement
from runtime.program.sizes import StepSizes

from ...model import tiny

T = 12


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen2_moe", "glm4_moe"])
def test_operations_are_those_of_a_plain_forward(family: str, tmp_path: Path) -> None:
    lm = tiny.make(tmp_path, family, num_hidden_layers=2).reference
    lm.set_attn_implementation("eager")
    lm.set_experts_implementation("eager")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        lm(torch.arange(20, 20 + T)[None])
    compiled = compile(meta_decoder(tmp_path), ExecutionPlan(StepSizes(T, 1, T)), Phase.PROMPT, T)
    ours = sum(work.flops for work in compiled.work(T, context=T).values())
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.003)


def test_deferred_experts_are_counted_once_on_the_cpu(tmp_path: Path) -> None:
    """The CPU's part does not say what of a token's experts is deferred: the whole program does."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=3)
    model, beside = meta_decoder(tmp_path), Placement("cuda:0", "cpu")
    none, one = (
        compile(model, ExecutionPlan(StepSizes(1, 1, 1), beside, deferred=k), Phase.DECODE)
        for k in (0, 1)
    )
    for name in ("nbytes", "flops"):
        counts = [sum(getattr(w, name) for w in each.work().values()) for each in (none, one)]
        assert counts[0] == counts[1]
