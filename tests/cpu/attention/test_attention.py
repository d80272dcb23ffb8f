"""The CPU's attention against the reference in float64, on the same bfloat16 cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pykernels.cpu.attention.kernel import make_attention
from pykernels.errors import PykernelsError
from pykernels.testing import assert_close

from ..kernels import only_with_all
from .steps import Step

BOUND = 2e-6
MLA = {"NH": 6, "KVH": 1, "D_K": 160, "D_V": 128, "mla": True}  # several vectors a head
# Those of the tiny models, whose kernels other tests compile too.
GQA = {"NH": 8, "KVH": 2, "D_K": 16, "D_V": 16}
SMALL_MLA = {"NH": 6, "KVH": 1, "D_K": 48, "D_V": 32, "mla": True}
RAGGED = [(1, 1), (3, 130), (70, 70), (1, 64), (100, 333), (1, 700)]
"""One token, few and many, with a cached prefix and without, at a page's end and behind it."""

STEPS = {
    "gqa": Step(RAGGED, **GQA),
    "mla": Step(RAGGED, **MLA),
    "window": Step(RAGGED, window=100, **GQA),
    "window-1": Step([(80, 200), (1, 600)], window=1, **GQA),
    "sinks": Step(RAGGED, sinks=True, **GQA),
    "long": Step([(1, 2000), (8, 1025)], sinks=True, window=1500, **GQA),
    "wide-group": Step([(2, 600), (9, 600)], NH=300, KVH=1, D_K=48, D_V=32, mla=True),
    "no-group": Step(RAGGED[:4], **{**GQA, "NH": 3, "KVH": 3}),
    "other-sizes": Step(RAGGED[:4], NH=3, KVH=3, D_K=16, D_V=80),
    "gqa-fp8": Step(RAGGED, codes=16, **GQA),
    "mla-fp8": Step(RAGGED, codes=32, **SMALL_MLA),
    "far-scores": Step([(30, 150)], scale=30.0, **GQA),
}


CASES = [pytest.param(name, marks=only_with_all if name == "other-sizes" else ()) for name in STEPS]


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name: str) -> None:
    step = STEPS[name]
    out, combines = step.run(make_attention(step.D_K, step.D_V, codes=step.codes))
    bound = 1e-4 if name == "far-scores" else BOUND  # of scores near 300, in float32
    assert_close(out, step.truth(), bound)
    tasks = {"gqa": 2, "mla": 1, "sinks": 2, "long": 2 * 5, "wide-group": 2 * 2 * 19}
    tasks |= {"gqa-fp8": 2, "mla-fp8": 1}
    assert combines == tasks.get(name, 0)  # of all others no sequence of few tokens sees two splits


@pytest.mark.parametrize(
    ("name", "N"), [("mla", 8), pytest.param("mla-fp8", 16, marks=only_with_all)]
)
def test_vectors_of_either_width(name: str, N: int) -> None:
    step = STEPS[name]
    out, _ = step.run(make_attention(step.D_K, step.D_V, N, step.codes))
    assert_close(out, step.truth(), BOUND)


def test_a_sequence_alone_has_the_same_bits() -> None:
    attention = make_attention(GQA["D_K"], GQA["D_V"])
    together = Step([(1, 700)] * 2, **GQA)
    out, _ = together.run(attention, backwards=True)
    alone = Step([(1, 700)], **GQA)
    for s in range(2):
        alone.q, alone.k, alone.v = together.q[s : s + 1], together.k, together.v
        alone.table = together.table[s : s + 1]
        assert torch.equal(alone.run(attention)[0], out[s : s + 1])


DRAFTED = {
    "gqa": {**GQA, "NH": 14},  # 14 rows of two tokens, 56 of eight
    "mla": SMALL_MLA | {"NH": 40},  # tiles of six tokens
    "many-heads": {**GQA, "NH": 16, "KVH": 16},  # no short splits from 513 keys on
    "window": {**GQA, "window": 100, "sinks": True},
    "window-1": {**GQA, "window": 1, "sinks": True},
    "window-3": {**GQA, "window": 3, "sinks": True},
    "long-window": {**GQA, "window": 300, "sinks": True},
    "gqa-fp8": {**GQA, "codes": 16, "sinks": True},
    "mla-fp8": {**SMALL_MLA, "codes": 32},
}


@pytest.mark.parametrize(("name", "N"), [*((name, None) for name in DRAFTED), ("gqa", 8)])
def test_tokens_of_a_sequence_have_the_bits_of_each_alone(name: str, N: int | None) -> None:
    """Up to eight in a step, as with drafts, over all lengths at which keys are split otherwise."""
    for tokens, keys in ((2, 60), (5, 130), (8, 260), (5, 515), (8, 516), (3, 1030)):
        together = Step([(tokens, keys)], **DRAFTED[name])
        attention = make_attention(together.D_K, together.D_V, N, together.codes)
        out, _ = together.run(attention)
        for t in range(tokens):
            alone = replace(together, sequences=[(1, keys - tokens + 1 + t)])
            for part in ("k", "v", "k_scale", "v_scale", "rope", "table", "sink"):
                setattr(alone, part, getattr(together, part))
            alone.q = together.q[t : t + 1]
            assert torch.equal(alone.run(attention)[0], out[t : t + 1]), (tokens, keys, t)


def test_too_little_memory_is_a_status() -> None:
    step, attention = STEPS["gqa"], make_attention(GQA["D_K"], GQA["D_V"])
    args, _held = step.args(attention, torch.empty_like(step.q))
    for name in ("items_capacity", "combines_capacity", "partial_bytes"):
        short = args.copy()
        short[name] = 1
        assert attention.setup.ctypes(short.ctypes.data, -1, 0) < 0


def test_other_head_sizes_are_refused() -> None:
    with pytest.raises(PykernelsError, match="D_V = 24"):
        make_attention(32, 24)
