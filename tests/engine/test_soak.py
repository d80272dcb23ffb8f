"""A short form of ``python -m bench.soak``, on the ref device; the long one is for a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import model
from bench.soak.check import AT_ONCE, Counts, answers, end, soak
from bench.soak.delays import Delays
from bench.soak.on_ref import on_ref

from ..model import tiny


@pytest.mark.parametrize(("defer", "steps"), [("off", 200), ("1", 60)])
def test_late_and_failing_halves_lose_no_token(defer: str, steps: int, tmp_path: Path) -> None:
    """And the workers end while requests run."""
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=2)
    random_, counts = random.Random(7), Counts()
    prompts = [[random_.randrange(2, 96) for _ in range(n)] for n in (3, 9, 20, 66) * 3]
    sizes = {"max_num_seqs": AT_ONCE, "max_num_batched_tokens": 32}
    with model.load_engine(
        tmp_path, threads=2, defer=defer, max_model_len=128, kv_tokens=2048, **sizes
    ) as llm:
        engine, runner, pool = on_ref(llm, 32, AT_ONCE)
        with engine:
            found = answers(llm.engine, engine, prompts, 8, 0.05)
            delays = Delays(pool, seed=7, most_us=1000, late_in=20, fails_in=60)
            delays.add(runner)
            soak(engine, runner.num_pages, found, steps, 7, counts)
            end(engine, pool, found, counts)
    assert counts.steps >= steps and counts.answered and counts.cancelled and counts.ended
    assert counts.failed and delays.late
