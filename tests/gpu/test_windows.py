"""Layers with a window whose pages are a pool of their own, on the cuda device, in Triton's
interpreter where there is no GPU: against transformers' own, over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ..engine.test_states import check, greedy, tokens
from ..engine.test_windows import GAINS
from ..model import tiny
from ..runners import CudaOptions
from .test_states import LENGTH, engine

ALL = pytest.mark.all
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {**TYPES, "enable_moe_block": False},
    "gpt_oss": TYPES,
    "mixtral": {"sliding_window": 24},  # of all layers
}
PAGES = 5
"""Of layers with a window: the two sequences have four of them while they decode."""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma4_text", CudaOptions("gpu")),
        pytest.param("gpt_oss", CudaOptions("cpu", dual_batch=True), marks=ALL),
        pytest.param("mixtral", CudaOptions("cpu", prefill="stream"), marks=ALL),
    ],
)
def test_nobody_misses_what_lies_behind_a_window(
    family: str, options: CudaOptions, tmp_path: Path, device: torch.device
) -> None:
    """Chunks of prompts beside decodes, which take each other's pages, and a second turn."""
    sizes = {"max_position_embeddings": LENGTH, "num_hidden_layers": 2, **FAMILIES[family]}
    gains = GAINS._replace(embedding=0.02) if family == "gemma4_text" else GAINS
    made = tiny.make(tmp_path, family, gains=gains, **sizes)
    prompts = [tokens(n, n) for n in (130, 70)]
    with engine(made.path, device, 16, replace(options, window_pages=PAGES)) as found:
        first = found.generate(prompts, greedy(4))
        turn = [*prompts[0], *first[0].token_ids, *tokens(40, 2)]
        [second] = found.generate([turn], greedy(2))
        windows = found._core.scheduler.manager.windows
        assert windows is not None and windows.pool.num_pages == PAGES
    for prompt, result in zip((*prompts, turn), (*first, second), strict=True):
        check(made, prompt, result, "cuda")
    assert second.completions[0].stats.cached_tokens == 128
