"""`pykernels bench contexts`: contexts that are filled are there, and no prompt is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import model
from runtime.profiling.engine_speed import EngineTimer

from ..model import tiny
from ..runners import ref_runner


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_filled_context_is_read_and_not_computed(family: str, tmp_path: Path) -> None:
    tiny.make(tmp_path, family, max_position_embeddings=512)
    with model.load_engine(tmp_path, device="ref", max_model_len=512, max_num_seqs=1) as llm:
        runner = ref_runner(llm.runner.model, 512, max_num_seqs=2, num_pages=24)
        timer = EngineTimer(runner)
        steps = timer.decode(2, 300, 2, filled=True)
        timer.close()
    assert [step.tokens for step in steps] == [2, 2]
    assert [step.context for step in steps] == [302, 303]
    assert timer.engine.stats.cached_tokens == 2 * 256  # four pages of each, of 299 tokens
    for name in runner.model.caches(1):
        held = runner.caches[name].float().flatten(1).abs().sum(1)
        assert torch.isfinite(held).all() and (held > 0).sum() >= 2, name
