"""Several ranks on the ref device, against transformers' log-probabilities in float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import model.llm
from pykernels.errors import PykernelsError
from runtime.devices.process_groups import ProcessGroups
from runtime.devices.ref.ranks import RanksExecutable, RanksRunner, StripedExecutable
from runtime.devices.ref.step import REF
from runtime.engine import Engine, Result, SamplingParams
from runtime.make_runner import make_plan
from runtime.passes.shard import EXPERTS, join, replica, sent_bytes, shard, stripe
from runtime.passes.shard.meetings import check_meetings
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import largest_step
from runtime.planning.work import expert_bytes
from runtime.program import Node
from runtime.program.sizes import StepSizes

from .. import tiny
from ..checks import Checkpoints
from .reference import truth_of

LENGTHS, DRAWN = (3, 17, 41), 6
EXACT = 1e-4
"""Nats by which a log-probability may be off in float32, in any order of sums."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in LENGTHS]


@contextmanager
def engine_of(
    path: Path, ranks: int, chunk: int = 16, **options: Any
) -> Iterator[tuple[Engine, RanksRunner]]:
    """An engine on so many ranks, whose steps have at most ``chunk`` tokens."""
    with model.load_engine(path, max_model_len=64, threads=1, device="ref") as llm:
        config = ExecutionConfig(
            "ref",
            defer=options.pop("deferred", 0),
            dual_batch=options.pop("dual_batch", False),
            prefill=options.pop("prefill", "cpu"),
        )
        sizes = largest_step(64, None, chunk, 4, chunk)
        plan = make_plan(config, llm.runner.model, 64, sizes)
        runner = RanksRunner(llm.runner.model, replace(plan, buckets=(8,)), ranks, **options)
        runner.load()
        yield Engine(runner, threaded=False), runner


def generated(engine: Engine) -> list[Result]:
    how: Any = {"temperature": 0, "ignore_eos": True, "logprobs": 20, "logprob_start": 1}
    return engine.generate(prompts(), SamplingParams(max_tokens=DRAWN, **how))


def error(made: tiny.Tiny, results: list[Result]) -> float:
    """The worst of all positions."""
    worst = 0.0
    for prompt, result in zip(prompts(), results, strict=True):
        truth = truth_of(made.reference, [*prompt, *result.token_ids[:-1]]).logprobs
        [found] = result.completions
        assert len(found.prompt_logprobs) + len(found.logprobs) == len(truth)
        for one, wanted in zip((*found.prompt_logprobs, *found.logprobs), truth, strict=True):
            tokens, logprobs = zip((one.token, one.logprob), *one.top, strict=True)
            worst = max(worst, float((torch.tensor(logprobs) - wanted[list(tokens)]).abs().max()))
    return worst


# Four heads, two of them of keys, and eight experts: three ranks have unequal shares.
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_moe", 2),
        ("qwen3_moe", 3),
        ("deepseek_v3", 2),
        ("deepseek_v3", 3),
        ("gpt_oss", 4),
        ("gemma4_text", 2),
        ("qwen2_moe", 2),
    ],
)
def test_logprobs_are_those_of_transformers(
    family: str, ranks: int, checkpoint: Checkpoints
) -> None:
    made = checkpoint(family)
    with engine_of(made.path, ranks) as (engine, _):
        assert error(made, generated(engine)) < EXACT


@pytest.mark.parametrize("striped", [False, True], ids=["heads", "stripes"])
def test_each_rank_streams_its_own_experts(striped: bool, checkpoint: Checkpoints) -> None:
    made = checkpoint("qwen3_moe")
    with engine_of(made.path, 3, striped=striped, prefill="stream") as (engine, runner):
        assert error(made, generated(engine)) < EXACT
    step = runner.steps[0]
    assert isinstance(step, RanksExecutable)
    loads = [[n for n in rank.program.nodes if n.op == "load_experts"] for rank in step.ranks]
    runs = [[(n.attr("first"), n.attr("count")) for n in own if n.layer == 0] for own in loads]
    experts = [e for own in runs for first, count in own for e in range(first, first + count)]
    assert experts == list(range(8))  # each crosses once, to one rank


@pytest.mark.parametrize("form", EXPERTS)
def test_ranks_may_have_unequal_shares(form: str, checkpoint: Checkpoints) -> None:
    """Of eight experts a rank with most of them leaves one to each of the others."""
    made, shares = checkpoint("qwen3_moe"), (1.0, 10.0, 1.0)
    options: dict[str, Any] = {"striped": True, "experts": form, "shares": shares}
    with engine_of(made.path, 3, prefill="stream", **options) as (engine, runner):
        assert error(made, generated(engine)) < EXACT
    step = runner.steps[0]
    assert isinstance(step, RanksExecutable)
    loads = [[n for n in rank.program.nodes if n.op == "load_experts"] for rank in step.ranks]
    assert [sum(n.attr("count") for n in own if n.layer == 0) for own in loads] == [1, 6, 1]


def test_two_lanes_on_two_ranks(checkpoint: Checkpoints) -> None:
    made = checkpoint("qwen3_moe")
    with engine_of(made.path, 2, dual_batch=True) as (engine, _):
        assert error(made, generated(engine)) < EXACT


def test_a_rank_that_fails_ends_the_engine_with_one_line(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(checkpoint("qwen3_moe").path, 3) as (engine, runner):
        step = runner.steps[0]
        assert isinstance(step, RanksExecutable)
        monkeypatch.setattr(step.ranks[1], "execute", failing)
        with pytest.raises(PykernelsError, match="rank 1 has failed: the device is gone. Load the"):
            generated(engine)
        with pytest.raises(PykernelsError, match="The engine has failed: rank 1 has failed"):
            generated(engine)


@pytest.mark.parametrize("striped", [False, True], ids=["heads", "stripes"])
def test_ranks_meet_through_gloo(striped: bool, checkpoint: Checkpoints) -> None:
    made, ranks = checkpoint("qwen3_moe"), 2
    with gloo(ranks) as ends:
        options: dict[str, Any] = {"striped": striped, "experts": "all_to_all", "ends": ends}
        with engine_of(made.path, ranks, **options) as (engine, runner):
            assert error(made, generated(engine)) < EXACT
            step = runner.steps[0]
            assert isinstance(step, RanksExecutable)
            step.ranks[1].execute = failing  # type: ignore[method-assign]
            with pytest.raises(PykernelsError, match="rank 1 has failed: the device is gone"):
                generated(engine)


@contextmanager
def gloo(ranks: int) -> Iterator[list[ProcessGroups]]:
    """The ends of ranks in threads of this process, over sockets."""
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as threads:
        made = [threads.submit(ProcessGroups, store, rank, ranks) for rank in range(ranks)]
        yield [each.result() for each in made]


def failing(node: Node) -> None:
    raise RuntimeError("the device is gone")


REFUSED = {
    ("olmoe", 2): "q_norm.weight is a norm over all heads",
    ("qwen3_moe", 5): "5 ranks for 4 heads",
    ("mixtral", 4): "4 ranks for 3 experts",
    ("qwen3_next", 2): "has layers with a state, which 2 ranks cannot share",
}


@pytest.mark.parametrize(("family", "ranks"), REFUSED)
def test_what_cannot_be_cut_is_refused(family: str, ranks: int, checkpoint: Checkpoints) -> None:
    config = {"num_local_experts": 3} if family == "mixtral" else {}
    decoder = model.llm.meta_decoder(checkpoint(family, **config).path)
    with pytest.raises(PykernelsError, match=REFUSED[family, ranks]):
        shard(decoder.lower(), ranks)


# Most prompts are longer than 16 tokens: so they have keys from steps before. A step of 72 tokens
# would have latents expanded, were it not striped.
@pytest.mark.parametrize(
    ("family", "ranks", "chunk", "experts", "attention"),
    [
        ("qwen3_moe", 2, 16, "small_ep", "ring"),
        ("qwen3_moe", 3, 16, "all_to_all", "gather"),
        ("deepseek_v3", 3, 16, "small_ep", "gather"),
        ("deepseek_v3", 2, 72, "small_ep", "ring"),
        ("deepseek_v3", 2, 72, "small_ep", "gather"),
        ("gpt_oss", 4, 16, "small_ep", "ring"),
        ("gpt_oss", 2, 16, "small_ep", "gather"),
    ],
)
def test_stripes_of_prompts(
    family: str, ranks: int, chunk: int, experts: str, attention: str, checkpoint: Checkpoints
) -> None:
    made = checkpoint(family)
    options = {"striped": True, "experts": experts, "attention": attention}
    with engine_of(made.path, ranks, chunk, **options) as (engine, runner):
        assert error(made, generated(engine)) < EXACT
    assert all(isinstance(step, StripedExecutable) for step in runner.steps)


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        ("qwen3_moe", 2, {}),
        ("deepseek_v3", 3, {}),
        ("qwen3_moe", 3, {"striped": True, "prefill": "stream"}),
        ("deepseek_v3", 2, {"striped": True, "prefill": "stream", "chunk": 72}),
        ("gpt_oss", 2, {"striped": True, "attention": "ring"}),
        ("qwen3_moe", 3, {"striped": True, "experts": "all_to_all", "prefill": "stream"}),
    ],
    ids=["heads", "latents", "stripes", "stripes of latents", "a ring", "all to all"],
)
def test_ranks_that_are_joined_to_one_program(
    family: str, ranks: int, options: dict[str, Any], checkpoint: Checkpoints
) -> None:
    made = checkpoint(family)
    chosen: dict[str, Any] = {"attention": "gather", **options, "joined": True}
    with engine_of(made.path, ranks, **chosen) as (engine, runner):
        assert error(made, generated(engine)) < EXACT
        caches = runner._caches[0]
        for name, cache in caches.items():  # all ranks have all keys and values
            if runner.striped and "." in name and not name.startswith(REF):
                for device in runner._devices[1:]:
                    assert torch.equal(cache, caches[replica(name, device)])


def test_a_rank_reads_its_share_of_the_weights(checkpoint: Checkpoints) -> None:
    """And meets the others twice in a layer, where routed and shared experts are added together."""
    decoder = model.llm.meta_decoder(checkpoint("qwen2_moe").path)
    for program in shard(decoder.lower(), 2):
        shapes = {n.name: program.weight(n, p).shape for n in program.nodes for p in n.weights}
        assert shapes["layer1.o"] == (64, 32)
        assert shapes["layer1.experts"] == (4, 64, 32)
        assert shapes["layer1.shared"] in ((1, 64, 32), (1, 64, 16))  # 48 in blocks of 32
        assert shapes["lm_head"] in ((32, 64), (64, 64))
        layer = [n.name for n in program.nodes if n.op == "all_reduce" and n.layer == 1]
        assert len(layer) == 2


def test_joined_ranks_read_each_expert_once(checkpoint: Checkpoints) -> None:
    decoder = model.llm.meta_decoder(checkpoint("qwen3_moe").path)
    joined = join(shard(decoder.lower(), 2), ["cuda:0", "cuda:1"])
    for tokens in (1, 8):
        assert expert_bytes(joined, tokens) == expert_bytes(decoder.lower(), tokens)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_small_ep_and_of_all_to_all(ranks: int, checkpoint: Checkpoints) -> None:
    """The paper's N D for the gathered tokens and for their sums, and N A D / S a pair of ranks;
    here of the N / S tokens that a rank sends."""
    decoder = model.llm.meta_decoder(checkpoint("qwen3_moe").path)
    program = decoder.lower(StepSizes(tokens=96))
    N, H, layers, A, others = 96, 64, 3, 3, ranks - 1
    own = 4 * N // ranks * H  # float32
    small, standard = (sent_bytes(stripe(program, ranks, form)[0]) for form in EXPERTS)
    assert small["reduce_scatter"] == layers * others * own
    assert small["all_gather"] == (layers + 1) * others * own  # and once in front of the head
    assert standard["combine"] == layers * A * own * others // ranks
    routing_bytes = layers * 12 * N // ranks * A * others // ranks  # an id and a factor each
    assert standard["dispatch"] == standard["combine"] + routing_bytes
    assert small["send"] == standard["send"]


def test_ranks_that_do_not_meet_are_refused(checkpoint: Checkpoints) -> None:
    decoder = model.llm.meta_decoder(checkpoint("qwen3_moe").path)
    for cut, left_out in ((shard, "layer1.o.all_reduce"), (stripe, "layer1.attention.recv0")):
        first, second = cut(decoder.lower(StepSizes(tokens=8)), 2)
        nodes = tuple(node for node in second.nodes if node.name != left_out)
        with pytest.raises(PykernelsError, match="rank .* comes to .*, where rank .* comes to"):
            check_meetings((first, replace(second, nodes=nodes)))
