"""Models whose layers keep a state of each sequence, against the same layers over whole sequences
in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from pykernels.errors import PykernelsError
from runtime.devices.cpu.runner import CpuRunner
from runtime.engine import Result, SamplingParams
from runtime.planning.work import cache_bytes

from ..model import tiny
from .recurrent import make_recurrent, recurrent_layers

ERROR = {"ref": 1e-5, "cpu": 0.06, "cuda": 0.06}
"""Of log-probabilities, which spread by 1.5: float32, and bfloat16 inputs, keys and values."""
DEVICES = ["ref", "cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
"""``tests/gpu/test_states.py`` has less of this in Triton's interpreter."""
CALM = tiny.Gains(layers=0.7, head=0.5, router=0.5)
"""Of gated delta nets, whose states hold sums of products of what is rounded."""
SIZES: dict[str, Any] = {
    "max_model_len": 448,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 96,
    "max_num_logits": 96,
    "snapshot_tokens": 128,
    "threads": 1,
}


@pytest.fixture(scope="module", params=["toy", "qwen3_next", "lfm2_moe"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tiny.Tiny]:
    path = tmp_path_factory.mktemp("recurrent")
    if request.param != "toy":
        yield tiny.make(path, request.param, max_position_embeddings=448, gains=CALM)
        return
    found = tiny.make(path, "qwen3_moe", max_position_embeddings=448)
    make_recurrent(found.reference).set_attn_implementation("eager")
    with recurrent_layers():
        yield found


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **more)


def check(made: tiny.Tiny, prompt: list[int], result: Result, device: str) -> None:
    """Every output is what the truth draws, but for ties that are nearer than its errors."""
    bound = ERROR[device.partition(":")[0]]
    for output in result.completions:
        ids = [*prompt, *output.token_ids]
        with torch.no_grad():
            logits = made.reference(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1)
        own = torch.tensor([each.logprob for each in output.logprobs])
        drawn = truth.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (own - drawn).abs().median() < bound / 4
        # A near-tie of experts may move a token of the cpu's further.
        assert ((own - drawn).abs() < bound).float().mean() > 0.9
        assert (truth.max(-1).values - drawn < 2 * bound).float().mean() > 0.9


def load(made: tiny.Tiny, device: str, **more: Any) -> model.LLM:
    if device.startswith("cuda") and made.reference.config.model_type == "qwen3_moe":
        pytest.skip("no GPU has the toy's op")
    return model.load_engine(made.path, device=device, **SIZES, **more)


def read_again(llm: model.LLM, prompt: list[int], count: int) -> tuple[Result, int]:
    """The answer, and how many tokens of the prompt came from the cache."""
    (result,) = llm.engine.generate([prompt], greedy(count))
    return result, result.completions[0].stats.cached_tokens


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_and_neighbours_leave_states_alone(device: str, made: tiny.Tiny) -> None:
    prompts = [tokens(n, n) for n in (3, 40, 150, 97)]
    with load(made, device) as llm:
        found = llm.engine.generate(prompts, greedy(12))
    for prompt, result in zip(prompts, found, strict=True):
        check(made, prompt, result, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefix_is_taken_up_at_snapshots(device: str, made: tiny.Tiny) -> None:
    """At the end of a prompt, of a turn, and where prompts part."""
    prompt = tokens(150, 1)
    with load(made, device) as llm:
        # Without log-probabilities: a step of the cpu's is launched behind the one that runs.
        plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        (first,) = llm.engine.generate([prompt], plain)
        turn = [*prompt, *first.token_ids, *tokens(20, 2)]
        second, cached = read_again(llm, turn, 8)
        assert cached == 192, "the last full page of the first answer"
        check(made, turn, second, device)
        again, cached = read_again(llm, prompt, 60)
        assert cached == 128 and again.token_ids == first.token_ids
        check(made, prompt, again, device)
        for wanted in (0, 64):  # the first of them leaves the prompt behind its first page
            other = [*prompt[:100], *tokens(30, 3 + wanted)]
            result, cached = read_again(llm, other, 4)
            assert cached == wanted
            check(made, other, result, device)


@pytest.mark.parametrize("device", DEVICES)
def test_forks_and_preempted_requests_copy_states(device: str, made: tiny.Tiny) -> None:
    with load(made, device, kv_tokens=9 * 64) as llm:
        prompt = tokens(100, 4)
        (forked,) = llm.engine.generate([prompt], greedy(4, n=2))
        assert [c.stats.cached_tokens for c in forked.completions] == [0, 64]
        check(made, prompt, forked, device)
        prompts = [tokens(120, seed) for seed in (5, 6, 7)]
        found = llm.engine.generate(prompts, greedy(90))
        assert llm.engine.stats.preemptions > 0
    for prompt, result in zip(prompts, found, strict=True):
        check(made, prompt, result, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_restart_takes_up_states(device: str, made: tiny.Tiny, tmp_path: Path) -> None:
    prompt = tokens(150, 1)
    for cached in (0, 128, 192):
        with load(made, device, kv_disk=tmp_path) as llm:
            result, found = read_again(llm, prompt, 60)
        assert found == cached
        check(made, prompt, result, device)
        if cached:
            prompt += [*result.token_ids, *tokens(20, 2)]


def test_states_in_two_lanes(made: tiny.Tiny) -> None:
    prompts = [tokens(n, n) for n in (5, 70, 30)]
    with model.load_engine(made.path, device="ref", dual_batch=True, **SIZES) as llm:
        assert any(node.microbatch for node in llm.runner.decode_steps[-1].program.nodes)
        found = llm.engine.generate(prompts, greedy(6))
    for prompt, result in zip(prompts, found, strict=True):
        check(made, prompt, result, "ref")


def test_what_states_cost_is_counted(made: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """By layers that keep a state, and those that keep keys and values of two heads of 16."""
    family = made.reference.config.model_type
    if family == "qwen3_next":  # three inputs of 192 channels, 4 heads
        state, token, times = 2 * (3 * 192 + 4 * 16 * 32) * 4, 2 * (2 * 2 * 16 * 2), 1000
    elif family == "lfm2_moe":  # two inputs of 64 channels
        state, token, times = 2 * (2 * 64) * 4, 2 * (2 * 2 * 16 * 2), 5000
    else:  # 64 channels with three float32 each
        state, token, times = 2 * 64 * 3 * 4, 2 * 2 * 16 * 2, 3000
    with model.load_engine(made.path, **{**SIZES, "snapshots": 5}) as llm:
        assert llm.runner.state_slots == 3 + 5
        assert sum(llm.runner.caches[name].nbytes for name in llm.runner.model.states) == 8 * state
        assert cache_bytes(llm.runner.model.lower(), 70) == 70 * token + state
    monkeypatch.setattr("model.checkpoint.memory.available", lambda: 4 << 20)
    needed = f"{(3 + times) * state / 2**20:.1f}"
    with pytest.raises(PykernelsError, match=f"sequences of {needed} MiB.*fewer snapshots"):
        model.load_engine(made.path, **{**SIZES, "snapshots": times})


def test_snapshots_of_a_model_without_states_are_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path, "deepseek_v3")
    with pytest.raises(PykernelsError, match="deepseek_v3 has no layer with a state"):
        model.load_engine(tmp_path, snapshots=4)


def test_drafts_are_refused_before_weights_are_read(
    made: tiny.Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuRunner, "load", lambda self: pytest.fail("weights were read"))
    with pytest.raises(PykernelsError, match="keep a state, from which no token can be taken back"):
        model.load_engine(made.path, draft="ngram", **SIZES)
    monkeypatch.undo()
    with model.load_engine(made.path, draft="auto", **SIZES) as llm:
        assert llm.engine.config.draft == "off"
