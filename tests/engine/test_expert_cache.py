"""Experts in slots that change between steps: the policy by hand and against all there is to do,
and a model that draws the same tokens whatever the slots hold."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import model
from model.llm import meta_decoder
from model.pinning.hybrid import gpu_experts_of, place_hybrid
from pykernels.errors import PykernelsError
from runtime.devices.gpus import gpus_of
from runtime.engine import Engine, SamplingParams
from runtime.experts.cache import CachePolicy, ExpertCache, Move, Swap, plan
from runtime.experts.cache.cache import Chosen
from runtime.experts.cache.simulate import Recording, best_fixed, simulate
from runtime.passes import offload
from runtime.planning.config import ExecutionConfig
from runtime.planning.lowerable import Pass
from runtime.planning.placement import Placement
from runtime.planning.residency import Filled
from runtime.program.sizes import StepSizes

from ..model import tiny
from ..runners import ref_runner


def test_plan_gains_as_much_as_any_swaps_could() -> None:
    """Against all sets of experts that as many swaps can leave in the slots."""
    random = np.random.default_rng(0)
    L, E, S, limit = 2, 5, 2, 2
    for margin, each in ((0.0, 2), (1.5, 2), (0.5, 1)):
        for _ in range(12):
            scores = random.integers(0, 7, (L, E)).astype(float)
            held = [tuple(random.choice(E, random.integers(0, S + 1), False)) for _ in range(L)]
            stays = np.zeros((L, E), bool)
            for row, experts in zip(stays, held, strict=True):
                row[list(experts)] = True
            free = np.array([S - len(experts) for experts in held])
            swaps = plan(scores, stays, ~stays, free, each, limit, margin)
            found = value(scores, held, swaps, margin)
            best = max(
                value(scores, held, chosen, margin)
                for n in range(limit + 1)
                for chosen in combinations(every_swap(held, free, E), n)
                if allowed(chosen, free, each)
            )
            assert found == best and len(swaps) <= limit


def every_swap(held: list[tuple[int, ...]], free: np.ndarray, E: int) -> list[Swap]:
    return [
        Swap(layer, expert, leaves)
        for layer, experts in enumerate(held)
        for expert in range(E)
        if expert not in experts
        for leaves in (*experts, *([-1] if free[layer] else []))
    ]


def allowed(swaps: tuple[Swap, ...], free: np.ndarray, each: int) -> bool:
    per_layer = [[s for s in swaps if s.layer == layer] for layer in range(len(free))]
    return all(
        len(own) <= each
        and len({s.expert for s in own}) == len(own)
        and len({s.leaves for s in own if s.leaves >= 0}) == sum(s.leaves >= 0 for s in own)
        and sum(s.leaves < 0 for s in own) <= free[layer]
        for layer, own in enumerate(per_layer)
    )


def value(scores: np.ndarray, held: object, swaps: object, margin: float) -> float:
    return sum(  # type: ignore[misc]
        scores[s.layer, s.expert] - (scores[s.layer, s.leaves] + margin if s.leaves >= 0 else 0)
        for s in swaps  # type: ignore[attr-defined]
    )


class Slow:
    """A filler whose slots are full when the test says so."""

    def __init__(self) -> None:
        self.queued: list[Move] = []
        self.full: list[Move] = []

    def begin(self, moves: list[Move]) -> None:
        self.queued += moves

    def finished(self) -> list[Move]:
        done, self.full = self.full, []
        return done

    def close(self) -> None: ...


def step(cache: ExpertCache, *experts: int, prompt: bool = False) -> list[int]:
    """One step that takes these experts of the only layer; the table that it reads."""
    cache.before_step()
    table = cache.table[0].tolist()
    ids = np.array(experts).reshape(-1, 1) if prompt else np.array([experts])
    cache.count([Chosen(0, ids)], len(ids), not prompt)
    cache.plan()
    return table


def test_a_slot_is_named_only_while_its_expert_is_there() -> None:
    """By hand: two slots, four experts, least recently used."""
    filler = Slow()
    cache = ExpertCache([2], 4, CachePolicy("lru-fixed", swaps=1), filler)
    assert step(cache, 3, 1, 1, 2, 1, 3, prompt=True) == [-1, -1, -1, -1]
    assert filler.queued == [Move(0, 1, 0), Move(0, 3, 1)]  # what the prompt took most often
    filler.full, filler.queued = filler.queued[:1], filler.queued[1:]
    assert step(cache, 0, 2) == [-1, 0, -1, -1]  # 3 is not there yet: the CPU computes it
    assert cache.stats.hits == 0 and cache.stats.missed == 2
    filler.full, filler.queued = filler.queued, []
    assert step(cache, 0, 2) == [-1, 0, -1, 1]  # one was on its way, so no other one was called
    assert filler.queued == []  # the step may read the slot of 3, which leaves for 0
    assert step(cache, 1, 3) == [-1, 0, -1, -1]
    assert filler.queued == [Move(0, 0, 1)]
    assert step(cache, 1, 0) == [-1, 0, -1, -1]  # nothing waits for it
    filler.full, filler.queued = filler.queued, []
    assert step(cache, 1, 0) == [1, 0, -1, -1]
    assert (cache.stats.swaps, cache.stats.choices, cache.stats.hits) == (3, 10, 4)


def test_counts_decide_and_fade() -> None:
    cache = ExpertCache([1], 3, CachePolicy("lfu", swaps=1, half_life=2, margin=1))
    for _ in range(3):
        step(cache, 0)
    slots = [step(cache, 1)[:2] for _ in range(5)]
    # Behind the third step 1 has 2.2, and what is left of 0's three choices is 0.8.
    assert slots == [[0, -1], [0, -1], [0, -1], [-1, -1], [-1, 0]]


def test_simulated_hits_are_counted_by_hand() -> None:
    ids = np.array([[[0], [1]], [[0], [1]], [[2], [1]], [[0], [3]], [[0], [1]]], np.int32)
    found = simulate([Recording(ids, 1)], 4, 1, CachePolicy("lfu", swaps=0))
    # The slots are full when the second step begins behind the prompt's.
    assert (found.choices, found.hits, found.missed) == (8, 4, 4)
    assert best_fixed([Recording(ids, 1)], 4, 1) == 6 / 8


@pytest.mark.parametrize(
    ("family", "policy", "passes", "error"),
    [("qwen2_moe", "lfu", (offload,), 0.02), ("deepseek_v3", "lru-fixed", (), 1e-4)],
)
def test_tokens_are_the_same_while_slots_change(
    family: str, policy: str, passes: tuple[Pass, ...], error: float, tmp_path: Path
) -> None:
    """With the others on the CPU, whose kernels round to bfloat16, or exact as the slots."""
    made = tiny.make(tmp_path, family)
    ids = [5, 17, 60, 33, 8, 90]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    found = []
    chosen = CachePolicy(policy, swaps=2, half_life=4, margin=0)
    with model.load_engine(tmp_path, max_model_len=64, threads=1, device="ref") as llm:
        for slots in ({}, {1: 3, 2: 3}):
            runner = ref_runner(
                llm.runner.model, 64, None, 16, 2, passes, llm.pool, slots=slots, policy=chosen
            )
            engine = Engine(runner, threaded=False)
            both = engine.generate([ids, ids[::-1]], params)
            found.append(both)
    assert runner.expert_slots is not None
    stats = runner.expert_slots.stats
    assert 0 < stats.hits < stats.choices and stats.swaps > 2 * 3
    for without, cached in zip(*found, strict=True):
        assert without.token_ids == cached.token_ids
        for a, b in zip(
            without.completions[0].logprobs, cached.completions[0].logprobs, strict=True
        ):
            assert a.logprob == pytest.approx(b.logprob, abs=error)
    with torch.no_grad():
        tokens = list(ids)
        for _ in range(12):
            tokens.append(int(made.reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert list(found[1][0].token_ids)[:2] == tokens[len(ids) : len(ids) + 2]


def test_where_there_is_no_room_for_slots() -> None:
    decoder = meta_decoder(model.EMBEDDED)
    program = decoder.lower()
    sizes = StepSizes(16)
    with pytest.raises(PykernelsError, match="8 experts of each layer need .* are left for them"):
        gpu_experts_of(8, program, Placement("cuda:0"), {"cuda:0": 1 << 20}, "expert_cache")
    with pytest.raises(PykernelsError, match="an expert cache with all experts on the GPU"):
        place_hybrid(None, decoder, "cpu", sizes, "gpu", cache=4)
    with pytest.raises(PykernelsError, match="an expert cache beside gpu_experts"):
        place_hybrid(2, decoder, "cpu", sizes, "cpu", cache=4)
    with pytest.raises(PykernelsError, match="expert_cache=4 without a GPU"):
        model.load_engine(model.EMBEDDED, expert_cache=4)
    placed = place_hybrid(None, decoder, "cpu", sizes, "auto", cache=4)
    slots = placed.filled(Filled.BETWEEN_STEPS).values()
    assert placed.experts == "cpu" and {each.slots for each in slots} == {4}
    nodes = placed.fill(placed.place(program)).nodes
    assert sum(node.role == "cached" for node in nodes) == len(slots) == 5
    both = place_hybrid(None, decoder, "cpu,cpu", sizes, "auto", cache=4, gpus="pipeline")
    gpus = {each.device for each in both.filled(Filled.BETWEEN_STEPS).values()}
    assert gpus == set(gpus_of("cpu,cpu"))


def test_what_a_policy_refuses() -> None:
    with pytest.raises(PykernelsError, match="no expert cache policy 'mru'"):
        CachePolicy("mru")
    with pytest.raises(PykernelsError, match="out of its range"):
        CachePolicy(swaps=-1)
    for wrong in ({"expert_cache": "some"}, {"expert_cache": -1}, {"expert_cache_policy": "mru"}):
        with pytest.raises(PykernelsError):
            ExecutionConfig(**wrong)  # type: ignore[arg-type]
