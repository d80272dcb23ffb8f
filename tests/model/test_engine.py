"""Formats, threads, chunks and late masks through the engine, against transformers' own model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model
from model.llm import LLM
from pykernels.errors import PykernelsError
from runtime.devices.cpu.step import CpuExecutable
from runtime.devices.ref.runner import RefRunner
from runtime.devices.ref.step import RefExecutable
from runtime.engine import SamplingParams
from runtime.passes.on_ref import on_ref
from runtime.planning.compile import Compiled
from runtime.program.sizes import StepSizes
from runtime.program.step_inputs import allocate_inputs

from ..cpu.kernels import fastest
from ..cpu.routed import TWO_CORES
from . import tiny

BF16 = 0.05
"""A share of the norm of a token's logits: inputs of matrices, keys and values are bfloat16."""

CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3 fp8": {"fp8": True},
    "deepseek_v3 int4": {"compressed": "int4", **tiny.FP8_SIZES},
    "deepseek_v3 int8": {"compressed": "int8-channel", **tiny.FP8_SIZES},
    "deepseek_v3 awq": {"compressed": "awq", **tiny.FP8_SIZES},
    "mixtral gptq": {"compressed": "gptq"},
    "minimax_m2 fp8": {"fp8": True, "intermediate_size": 128},
}
"""Formats of stored weights; ``families`` has those in bfloat16."""

ON_THE_FASTEST = ("deepseek_v3 fp8",)
"""Cases that run on what "auto" takes on this CPU; the others on the generic kernels."""


def logits(llm: LLM, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] of one sequence, in one step."""
    T, pages = len(ids), 1 + len(ids) // 64
    lowered = llm.runner.model
    program = lowered.lower(StepSizes(T, 1, T, pages, pages))
    inputs = allocate_inputs(program) | {
        "tokens": ids,
        "positions": torch.arange(T),
        "slot_mapping": torch.arange(T),
        "logits_indices": torch.arange(T),
        "page_table": torch.arange(pages)[None],
    }
    if lowered.states:
        inputs["query_lengths"] = torch.tensor([T])
    caches = {name: part.zeros() for name, part in lowered.caches(pages).items()}
    step: CpuExecutable | RefExecutable
    if isinstance(llm.runner, RefRunner):
        exact = {name: cache.float() for name, cache in caches.items()}
        step = RefExecutable(Compiled.of(on_ref(program)), llm.runner.weights, inputs, exact)
    else:
        step = CpuExecutable(program, llm.runner.weights, llm.pool, inputs, caches)
    step.sizes[:] = torch.tensor([T, 1, T])
    step.run()
    return step.outputs["logits"]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_within_bfloat16_of_transformers(case: str, tmp_path: Path) -> None:
    made = tiny.make(tmp_path, case.split()[0], **CASES[case])
    ids = torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        truth = made.reference(ids[None]).logits[0]
    kernel = fastest() if case in ON_THE_FASTEST else "generic"
    with model.load_engine(tmp_path, max_model_len=64, kernel=kernel) as llm:
        error = (logits(llm, ids) - truth).norm(dim=-1) / truth.norm(dim=-1)
    # A near-tie that routes a token otherwise may move it further; which ones, the CPU's order of
    # sums decides.
    assert error.median() < BF16 and (error < 2 * BF16).float().mean() > 0.85


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with model.load_engine(model.EMBEDDED, kernel=fastest(), draft="off") as made:
        yield made


PROMPTS = ("def quicksort(xs):", "class Stack:\n    def __init__(self):", "    raise ValueError(")


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    lm = model.from_pretrained(model.EMBEDDED, rules=[], dtype="float32")
    for prompt in PROMPTS:
        ids = llm.encode(prompt)
        truth = lm.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0]
        found = llm.generate(ids, temperature=0, max_tokens=32)
        assert list(found.token_ids) == truth[len(ids) :].tolist()


def test_neighbours_and_threads_change_no_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [llm.encode(prompt) for prompt in PROMPTS]
    alone = [llm.engine.generate([one], params)[0].token_ids for one in ids]
    together = [result.token_ids for result in llm.engine.generate(ids, params)]
    with model.load_engine(model.EMBEDDED, threads=1, kernel=fastest()) as single:
        serial = [single.engine.generate([one], params)[0].token_ids for one in ids]
    assert alone == together == serial


def test_steps_that_are_scheduled_ahead_draw_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time: neighbours change the order of sums, a little. The first two are in
    the workers' ring before the step ends that brings their tokens."""
    behind: list[object] = []
    start = llm.pool.start_behind
    monkeypatch.setattr(llm.pool, "start_behind", lambda *a: behind.append(a) or start(*a))
    how = [
        SamplingParams(seed=3, temperature=0.9, top_k=30, max_tokens=150, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=90, stop_token_ids=(198, 201, 13)),
        SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2),
        SamplingParams(seed=1, max_tokens=50, repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(seed=2, max_tokens=60, stop="\n", min_tokens=9, top_p=0.9, logprobs=0),
    ]
    found = []
    with model.load_engine(model.EMBEDDED, kernel=fastest(), overlap=False) as plain:
        for each in (llm, plain):
            outputs = [each.generate(PROMPTS[0], params).completions[0] for params in how]
            found.append([(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs])
    assert found[0] == found[1]
    assert 140 < len(behind) < 240


def test_a_long_prompt_in_pieces_and_from_the_cache(llm: LLM) -> None:
    """In chunks of the token budget, then again with most of its pages found."""
    ids = llm.encode("x = [1, 2, 3]\n" * 160)
    assert 512 < len(ids) < 2000
    first = llm.generate(ids, temperature=0, max_tokens=16)
    again = llm.generate(ids, temperature=0, max_tokens=16)
    assert again.completions[0].stats.cached_tokens >= 64 * (len(ids) // 64) - 64
    assert again.token_ids == first.token_ids


def test_generate_hands_its_loop_to_the_engine() -> None:
    """Ragged rows, padded on the left; greedily and by torch's seed."""
    lm, tokenizer = model.from_pretrained(model.EMBEDDED), model.load_tokenizer(model.EMBEDDED)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    truth = lm.generate(**inputs, max_new_tokens=12, do_sample=False)
    ours = {"custom_generate": model.custom_generate, "max_new_tokens": 12}
    assert torch.equal(lm.generate(**inputs, **ours, do_sample=False), truth)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(lm.generate(**inputs, **ours, do_sample=True, temperature=2.0))
    assert torch.equal(*drawn) and not torch.equal(drawn[0], truth)


def test_a_cache_in_e4m3(tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe")
    ids = torch.randint(0, 96, (100,), generator=torch.Generator().manual_seed(3))
    found: dict[str, torch.Tensor] = {}
    for kv_dtype in ("bf16", "fp8"):
        with model.load_engine(tmp_path, max_model_len=128, kv_dtype=kv_dtype) as llm:
            found[kv_dtype] = logits(llm, ids)
            cold, cached = (
                llm.generate(ids.tolist(), temperature=0, max_tokens=8).token_ids for _ in range(2)
            )
            assert cold == cached
    error = (found["fp8"] - found["bf16"]).norm(dim=-1) / found["bf16"].norm(dim=-1)
    assert 0 < error.median() < BF16
    with pytest.raises(PykernelsError, match="'int8'"):
        model.load_engine(tmp_path, kv_dtype="int8")


class EveryOther:
    """Even and odd tokens in turns; each time it takes longer than a step."""

    count = 0

    def begin(self) -> EveryOther:
        return EveryOther()

    def allowed(self, mask: np.ndarray) -> None:
        time.sleep(0.01)
        mask[:] = 0x55555555 << self.count % 2 & 0x7FFFFFFF

    def accept(self, token: int) -> None:
        self.count += 1


@TWO_CORES
@pytest.mark.parametrize(
    "where",
    [
        {"device": "cpu"},
        pytest.param({"device": "cuda:0", "experts": "cpu"}, marks=pytest.mark.gpu),
        pytest.param({"device": "cuda:0", "experts": "gpu"}, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "gpu, experts on the cpu", "gpu"],
)
def test_sampling_waits_for_masks_that_are_late(tmp_path: Path, where: dict[str, str]) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=1)
    with model.load_engine(tmp_path, max_model_len=64, threads=2, **where) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, constraint=EveryOther())
        free = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
        masked, beside = llm.engine.generate([[5, 6], [7]], [params, free])
        [alone] = llm.engine.generate([[7]], free)
        assert llm.runner.late_masks
    tokens = masked.completions[0].token_ids
    assert [token % 2 for token in tokens] == [0, 1] * 10
    assert beside.token_ids == alone.token_ids
