"""A short form of ``bench.soak``, on the ref device; the long one is for a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import model
from bench import soak

from ..model import tiny


@pytest.mark.parametrize(("defer", "steps"), [("off", 200), ("1", 60)])
def test_late_and_failing_halves_lose_no_token(defer: str, steps: int, tmp_path: Path) -> None:
    """And the workers end while requests run."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    sizes = {"max_model_len": 128, "max_num_seqs": soak.AT_ONCE}
    sizes["max_num_batched_tokens"] = 32 if defer == "off" else soak.AT_ONCE * 66
    random_, counts = random.Random(7), soak.Counts()
    prompts = [[random_.randrange(2, 96) for _ in range(n)] for n in (3, 9, 20, 66) * 3]
    with model.load_engine(tmp_path, threads=2, defer=defer, kv_tokens=2048, **sizes) as llm:
        engine, runner, pool = soak.on_ref(llm, sizes, defer)
        found = soak.answers(llm, engine, prompts, 8, 0.05)
        with engine:
            delays = soak.Delays(pool, 7, 1000, 20, 60)
            delays.add(runner)
            soak.soak(engine, runner.num_pages, found, steps, 7, counts)
            soak.end(engine, pool, found, counts)
    assert counts.steps >= steps and counts.answered and counts.cancelled and counts.ended
    assert counts.failed and delays.late
