"""Penalties through the engine: tokens are counted where they are drawn, also of sequences that are
preempted and begun anew."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import model
from runtime.engine import Engine, SamplingParams
from runtime.engine.requests.request import Event

from ..model import tiny
from ..runners import ref_runner

NEW = 12


def test_penalties_are_transformers_whoever_is_preempted(tmp_path: Path) -> None:
    made = tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 96, (60,), generator=generator).tolist() for _ in range(3)]
    with model.load_engine(tmp_path, max_model_len=128, threads=1, device="ref") as llm:
        runner = ref_runner(llm.runner.model, 128, 3, max_num_batched_tokens=64, max_num_seqs=3)
        engine = Engine(runner, threaded=False)
        params = SamplingParams(
            temperature=0, repetition_penalty=1.4, max_tokens=NEW, ignore_eos=True
        )
        found = engine.generate(prompts, params)
        drawn = found[0].token_ids
        events: list[Event] = []
        engine.submit_to(events.append, prompts[0], params, drawn=drawn[:5])
        while engine.step():
            pass
    penalty = RepetitionPenaltyLogitsProcessor(1.4)
    for prompt, result in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NEW):
                logits = penalty(ids, made.reference(ids).logits[:, -1].float())
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        assert list(result.token_ids) == ids[0, len(prompt) :].tolist()
    assert engine.stats.preemptions > 0
    assert tuple(event[1] for event in events) == drawn[5:], "behind what another engine drew"
