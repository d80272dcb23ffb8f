"""What a step computes, against what torch counts in transformers' own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.llm import meta_decoder
from runtime.planning.compile import compile
from runtime.planning.execution import ExecutionPlan, Phase
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
