"""What a request draws depends on nothing that runs beside it, and no page gets lost."""

from __future__ import annotations

import random

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig, RequestHandle, SamplingParams
from runtime.kv_cache.windows import least_pages

from .fake_runner import FakeRunner, check_pages, check_states, check_windows, expected, score


def owned(runner: FakeRunner, **how: object) -> Engine:
    return Engine(runner, threaded=False, **how)  # type: ignore[arg-type]


def params(seed: int, count: int, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, **more)  # type: ignore[arg-type]


def check_all_free(engine: Engine) -> None:
    stats = engine.stats
    assert stats.waiting == stats.running == 0
    check_pages(engine._core.scheduler.manager, [])


def test_a_batch_draws_what_each_draws_alone() -> None:
    prompts = [list(range(i, i + size)) for i, size in enumerate((1, 4, 7, 30, 40))]
    runner = FakeRunner()
    engine = owned(runner)
    results = engine.generate(prompts, [params(i, 10 + i) for i in range(5)])
    for i, result in enumerate(results):
        assert result.token_ids == expected(prompts[i], i, 10 + i)
        assert result.completions[0].finish_reason == "length"
    assert max(runner.sizes) == runner.max_num_batched_tokens, (
        "prompts in pieces that fill the budget"
    )
    check_all_free(engine)


def test_long_prompts_do_not_stop_those_that_decode() -> None:
    runner = FakeRunner()
    engine = owned(runner)
    first = engine.submit([1, 2, 3], params(1, 20))
    engine.step()
    engine.submit(list(range(100)), params(2, 2))
    for _ in range(6):  # the first of them runs already
        engine.step()
    assert runner.sizes[2:7] == [16] * 5
    assert len(runner.drawn[1]) == 7
    assert first.result().token_ids == expected([1, 2, 3], 1, 20)


def test_a_known_prefix_is_not_computed_again() -> None:
    runner = FakeRunner(max_num_batched_tokens=64)
    engine = owned(runner)
    system = list(range(40))
    [one] = engine.generate([[*system, 1]], params(1, 6))
    used = engine.stats.cached_pages
    assert used == 11  # 41 + 5 tokens in full pages of 4
    results = engine.generate([[*system, 2], [*system, 3]], [params(2, 2), params(3, 2)])
    assert runner.sizes[-2] == 2, "one token of each prompt is new"
    assert [r.completions[0].stats.cached_tokens for r in results] == [40, 40]
    assert engine.stats.cached_pages == used, "neither filled a page of its own"
    chat = [*system, 1, *one.token_ids, 5]
    [again] = engine.generate([chat], params(4, 1))
    assert again.completions[0].stats.cached_tokens == 44, "answers are remembered too"
    assert again.token_ids == expected(chat, 4, 1)
    check_all_free(engine)


def test_preempted_requests_lose_nothing() -> None:
    runner = FakeRunner(num_pages=12)
    engine = owned(runner)
    prompts = [[i] * 9 for i in range(4)]
    results = engine.generate(prompts, [params(i, 30) for i in range(4)])
    assert engine.stats.preemptions > 0 and engine.stats.prompt_tokens == 4 * 9
    assert results[0].completions[0].stats.preemptions == 0, "the oldest is the last to go"
    for i, result in enumerate(results):
        assert result.token_ids == expected(prompts[i], i, 30)
    check_all_free(engine)


def test_priority_is_served_first_and_preempted_last() -> None:
    runner = FakeRunner(num_pages=12, max_num_seqs=2)
    engine = owned(runner)
    low = [engine.submit([i] * 5, params(i, 20, priority=1)) for i in range(3)]
    engine.step()
    high = engine.submit([9] * 5, params(9, 20, priority=0))
    result = high.result()
    assert result.completions[0].stats.preemptions == 0
    assert list(runner.drawn) == [0, 1, 9, 2], "the third came earlier, and waits longer"
    for i, handle in enumerate(low):
        assert handle.result().token_ids == expected([i] * 5, i, 20)


def test_forks_share_the_prompt_and_draw_their_own() -> None:
    runner = FakeRunner()
    engine = owned(runner)
    prompt = list(range(14))
    [result] = engine.generate([prompt], params(5, 6, n=3))
    outputs = [c.token_ids for c in result.completions]
    assert len(set(outputs)) == 3
    assert outputs[0] == expected(prompt, 5, 6)
    assert sorted(outputs) == sorted(expected(prompt, seed, 6) for seed in runner.drawn)
    assert runner.sizes[:2] == [14, 1 + 2 + 2], "three full pages of the prompt are shared"
    check_all_free(engine)


def test_prompts_that_come_at_once_share_what_comes() -> None:
    runner = FakeRunner(max_num_batched_tokens=30)
    engine = owned(runner)
    prompts = [[*range(50), i, i, i, i] for i in range(3)]
    results = engine.generate(prompts, [params(i, 2) for i in range(3)])
    # 48 of the 50 are whole pages: the first computes them, for the others 6 are left.
    assert runner.sizes[:3] == [30, 24, 1 + 6 + 6]
    assert [r.token_ids for r in results] == [expected(p, i, 2) for i, p in enumerate(prompts)]


def test_penalties_see_what_was_drawn() -> None:
    runner = FakeRunner(vocab_size=11, num_pages=12)  # it compares the counts in every step
    engine = owned(runner)
    how = [params(i, 25, presence_penalty=0.5) for i in range(3)]
    results = engine.generate([[1, 2, 2, i] for i in range(3)], how)
    assert engine.stats.preemptions > 0
    assert results[2].token_ids == expected([1, 2, 2, 2], 2, 25, vocab=11)


def test_prompts_are_scored_beside_what_runs() -> None:
    """In pieces, behind a cached prefix, under preemption: each token's logprob, once."""
    runner = FakeRunner(num_pages=24, max_num_batched_tokens=14)
    engine = owned(runner)
    trunk = list(range(100, 118))
    beside = engine.submit([1] * 30, params(0, 40))
    prompts = [[*trunk, *range(i, i + 3 * i + 1)] for i in range(1, 8)]
    starts = [len(trunk), 1, 18, 19, len(trunk) + 16, 5, 18]
    how = [params(i, 3 * i, logprobs=2, logprob_start=start) for i, start in enumerate(starts, 1)]
    results = engine.generate(prompts, how)
    for prompt, start, one, result in zip(prompts, starts, how, results, strict=True):
        output = result.completions[0]
        assert result.token_ids == expected(prompt, one.seed or 0, one.max_tokens or 0)
        assert [(p.token, p.logprob) for p in output.prompt_logprobs] == [
            (prompt[at], score(prompt[:at], prompt[at])) for at in range(start, len(prompt))
        ]
    cached = [result.completions[0].stats.cached_tokens for result in results]
    assert cached[1] == 0 and max(cached) == 16, "what is scored is computed"
    assert engine.stats.preemptions > 0
    assert beside.result().token_ids == expected([1] * 30, 0, 40)
    check_all_free(engine)


@pytest.mark.parametrize(
    ("prompt", "how", "named"),
    [
        ([], {}, "prompt"),
        ([5, 997], {}, "997"),
        ([1] * 150, {"max_tokens": 60}, "context"),
        ([1] * 100, {"max_tokens": 50}, "cache"),
        ([1], {"stop": "x"}, "detokenizer"),
        ([1], {"logit_bias": {2000: 1.0}}, "logit_bias"),
        ([1], {"logprobs": 0, "logprob_start": 2}, "logprob_start"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], how: dict, named: str) -> None:
    engine = owned(FakeRunner(num_pages=32 if named == "cache" else 64))
    with pytest.raises(PykernelsError, match=f"mine.*{named}"):
        engine.submit(prompt, SamplingParams(**how), name="mine")


def test_more_biases_than_a_sequence_may_have_are_refused() -> None:
    engine = owned(FakeRunner(vocab_size=5000))
    most = dict.fromkeys(range(4096), 1.0)
    engine.submit([1], SamplingParams(max_tokens=2, logit_bias=most))
    for how in ({"logit_bias": most | {4999: 1.0}}, {"min_tokens": 1, "stop_token_ids": [4999]}):
        with pytest.raises(PykernelsError, match="mine.*4097 tokens are biased"):
            engine.submit(
                [1], SamplingParams(**{"max_tokens": 2, "logit_bias": most} | how), name="mine"
            )


@pytest.mark.parametrize(
    ("streams_from", "asked", "sizes"),
    [(0, None, [1024, 1024, 153]), (20, None, [2200, 1]), (20, 1024, [1024, 1024, 153])],
)
def test_snapshots_do_not_cut_steps_to_which_all_experts_cross(
    streams_from: int, asked: int | None, sizes: list[int]
) -> None:
    """Unless they are asked for; the one behind the last full page is taken in any case."""
    runner = FakeRunner(
        num_pages=600, max_num_batched_tokens=2400, max_model_len=2400, state_slots=24
    )
    runner.streams_from = streams_from
    engine = owned(runner, config=EngineConfig(snapshot_tokens=asked, prefill_yield=0.0))
    prompt = [n % 997 for n in range(2201)]
    engine.generate([prompt], params(1, 1))
    assert runner.sizes == sizes
    [again] = engine.generate([[*prompt[:2200], 5]], params(2, 1))
    assert again.completions[0].stats.cached_tokens == (2048 if len(sizes) > 2 else 2200)


def test_a_failed_step_leaves_no_snapshot() -> None:
    """The second request fails where it leaves what the first one has computed; the third one is
    scheduled behind its snapshot already."""
    runner = FakeRunner(state_slots=12, max_num_batched_tokens=64)
    engine = owned(runner, config=EngineConfig(snapshot_tokens=32))
    engine.generate([[5]], params(1, 14))
    trunk = [5, *expected([5], 1, 7)]  # in the middle of the answer, where no snapshot is
    second = engine.submit([*trunk, 2], params(2, 3))
    third = engine.submit([*trunk, 3], params(3, 3))
    runner.fail_next = RuntimeError("lost")
    with pytest.raises(PykernelsError, match="lost"):
        second.result()
    assert third.result().token_ids == expected([*trunk, 3], 3, 3)
    assert third.requests[0].preemptions == 1
    [fourth] = engine.generate([[*trunk, 4]], params(4, 3))
    assert fourth.token_ids == expected([*trunk, 4], 4, 3)
    assert fourth.completions[0].stats.cached_tokens == 8
    check_states(runner, engine._core.scheduler.manager, [])


def test_a_prefix_is_shared_as_far_as_its_last_window_is_there() -> None:
    """Ends of conversations stay longest, and where prompts have parted before."""
    runner = FakeRunner(num_pages=99, max_num_seqs=2, window_pages=14, window=9)
    engine = owned(runner)

    def cached(prompt: list[int], seed: int, count: int) -> int:
        [result] = engine.generate([prompt], params(seed, count))
        assert result.token_ids == expected(prompt, seed, count)
        return result.completions[0].stats.cached_tokens

    trunk = list(range(42))
    assert cached(trunk, 1, 6) == 0
    assert cached([9] * 150, 2, 2) == 0  # many pages, which are of no use to others
    assert cached([*trunk, *expected(trunk, 1, 6), 5], 3, 1) == 44
    assert [cached([*trunk[:20], 7, i], 4 + i, 1) for i in range(2)] == [0, 20]
    assert cached([*trunk[:41], 8], 6, 1) == 40, "the end of the first prompt"
    check_all_free(engine)
    check_windows(engine._core.scheduler.manager, [])


def test_a_failed_step_completes_no_window() -> None:
    """It computes again what the tree knows, but for layers with a window."""
    runner = FakeRunner(num_pages=99, max_num_seqs=2, window_pages=11, window=9)
    engine = owned(runner)
    trunk = list(range(14))
    engine.generate([trunk], params(1, 1))
    engine.generate([[i] * 60 for i in range(4)], [params(2 + i, 1) for i in range(4)])
    second = engine.submit([*trunk, 2], params(7, 3))
    third = engine.submit([*trunk, 3], params(8, 3))
    runner.fail_next = RuntimeError("lost")
    with pytest.raises(PykernelsError, match="lost"):
        second.result()
    assert third.result().token_ids == expected([*trunk, 3], 8, 3)
    [fourth] = engine.generate([[*trunk, 4]], params(9, 3))
    assert fourth.token_ids == expected([*trunk, 4], 9, 3)
    assert fourth.completions[0].stats.cached_tokens == 12
    check_windows(engine._core.scheduler.manager, [])


def test_sequences_wait_for_slots_of_states() -> None:
    runner = FakeRunner(state_slots=2)
    engine = owned(runner)
    results = engine.generate([[i] * 5 for i in range(4)], [params(i, 6) for i in range(4)])
    assert [r.token_ids for r in results] == [expected([i] * 5, i, 6) for i in range(4)]
    assert engine.stats.preemptions == 0 and runner.most_seqs == 2


@pytest.mark.parametrize(
    ("state_slots", "saves", "window"),
    [(0, False, 0), (15, False, 0), (15, True, 0), (0, False, 21)],
    ids=["keys and values", "states", "states that steps save", "windows"],
)
def test_nothing_leaks_from_2000_random_requests(
    state_slots: int, saves: bool, window: int
) -> None:
    """Nor slots of states, where those of three snapshots are all that no sequence may have; nor
    pages of layers with a window, of which there are as few as can be."""
    rng = random.Random(7)
    runner = FakeRunner(
        page_size=8,
        num_pages=30 if window else 48,
        max_num_batched_tokens=40,
        max_num_seqs=6 if window else 12,
        state_slots=state_slots,
        saves_states=saves,
        window_pages=least_pages(6, 21, 8) if window else 0,
        window=window,
    )
    engine = owned(runner, eos_token_ids=[3], config=EngineConfig(snapshot_tokens=16))
    trunk = [rng.randrange(900) for _ in range(60)]
    live: list[tuple[RequestHandle, list[int], int, int]] = []
    done, seed = 0, 0
    while done < 2000:
        for _ in range(min(rng.randrange(3), 2000 - seed) if seed < 2000 else 0):
            shared = trunk[: rng.choice((0, 8, 20, 40))]
            prompt = shared + [rng.randrange(900) for _ in range(rng.randrange(1, 30))]
            count = rng.randrange(1, 50)
            stops = rng.sample(range(900), rng.choice((0, 0, 40)))
            how = params(seed, count, stop_token_ids=stops, priority=rng.choice((0, 0, 1)))
            live.append((engine.submit(prompt, how), prompt, seed, count))
            seed += 1
        engine.step()
        if live and rng.random() < 0.1:
            rng.choice(live)[0].cancel()
        for item in [item for item in live if item[0].requests[0].reason]:
            live.remove(item)
            done += 1
            handle, prompt, own, count = item
            completion = handle.result().completions[0]
            whole = expected(prompt, own, count)
            assert completion.token_ids == whole[: len(completion.token_ids)]
            ends = {3, *handle.requests[0].params.stop_token_ids}
            if completion.finish_reason == "length":
                assert completion.token_ids == whole
            elif completion.finish_reason == "stop":
                assert completion.token_ids[-1] in ends
            assert not ends.intersection(completion.token_ids[:-1])
        if done % 100 == 0:
            manager = engine._core.scheduler.manager
            tables = [r.table for r in engine._core.scheduler.requests()]
            check_pages(manager, tables)
            if state_slots:
                check_states(runner, manager, tables)
            if window:
                check_windows(manager, tables)
    stats = engine.stats
    assert stats.finished == 2000 and stats.preemptions > 10 and stats.cached_tokens > 1000
    assert (runner.saved > 500) == saves
    check_all_free(engine)
    assert stats.free_pages + stats.cached_pages == runner.num_pages
