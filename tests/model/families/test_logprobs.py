"""Every family on every device, against transformers' own float32 model: log-probabilities of a
prompt, which is read in chunks, and of tokens that are drawn one by one.

By default each row runs on the ref device and with the kernel that "auto" takes here, and the plain
rows on a GPU if there is one; with ``--all`` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams
from runtime.engine.requests.outputs import TokenLogprob

from ...cpu.kernels import only_with_all
from .. import tiny
from ..checks import Checkpoints
from .places import CUDA, GPU, KERNELS, engine_at
from .reference import truth_of
from .rows import HEADS, PLAIN, REFUSED, ROWS, WRONG_HEADS

MEDIAN, MOST = 2e-3, 1e-2
"""Errors of log-probabilities, in nats, where those of unrelated tokens are 0.5: of the median
position, and of the worst one away from near-ties: inputs of matrices, keys and values are
bfloat16."""
GAP = 2e-3
"""A score so little above the first refused one's is a near-tie, which rounding may turn. Behind a
token that another expert took so, twice as much: what attends to it is moved, too."""
EXACT = 1e-4
"""The same on the ref device."""
PROMPT = 104
GAINS = tiny.Gains(layers=0.7, head=0.5, router=0.5, choice=0.1)
"""By which a layer adds about half of what it is given, and rounding to bfloat16 0.0008."""
INTERPRETED = ("qwen3_moe", "cuda experts gpu")
"""What Triton interprets by default, in about 15 s of a processor."""


def cases() -> Iterator[Any]:
    for row in ROWS:
        for place in ("ref", *KERNELS, *CUDA):
            if row in (HEADS if place in KERNELS else REFUSED if place in CUDA else ()):
                continue
            usual = place in ("ref", KERNELS[0]) or (row, place) == INTERPRETED
            usual = usual or (GPU and place in CUDA and row in PLAIN)
            yield pytest.param(row, place, marks=() if usual else only_with_all)


def errors(found: tuple[TokenLogprob, ...], truth: torch.Tensor) -> torch.Tensor:
    """[T] of each position, the mean over its token and the likeliest ones; truth: [T, V]."""
    each = []
    for one, wanted in zip(found, truth, strict=True):
        tokens, logprobs = zip((one.token, one.logprob), *one.top, strict=True)
        each.append((torch.tensor(logprobs) - wanted[list(tokens)]).abs().mean())
    return torch.stack(each)


@pytest.mark.parametrize(("row", "place"), list(cases()))
def test_logprobs_are_those_of_transformers(row: str, place: str, checkpoint: Checkpoints) -> None:
    family, config = ROWS[row]
    tied = config.get("tie_word_embeddings", False)
    gains = GAINS._replace(embedding=0.02) if tied else GAINS  # it is the head, too
    made = checkpoint(family, gains=gains, **config)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(2, config["vocab_size"], (PROMPT,), generator=generator).tolist()
    drawn = 4 if place in CUDA and not GPU else 24
    how: Any = {"temperature": 0, "ignore_eos": True, "logprobs": 20, "logprob_start": 1}
    with engine_at(place, made.path) as engine:
        [result] = engine.generate([prompt], SamplingParams(max_tokens=drawn, **how))
    [found] = result.completions
    truth = truth_of(made.reference, [*prompt, *found.token_ids[:-1]])
    error = errors((*found.prompt_logprobs, *found.logprobs), truth.logprobs)
    of_prompt, of_drawn = error.split([PROMPT - 1, drawn])
    turned = (error > MOST) & (truth.gap <= GAP)
    away = truth.gap > torch.where(turned.cumsum(0) > 0, 2 * GAP, GAP)
    median, worst = max(of_prompt.median(), of_drawn.median()), error[away].max()
    print(f"{row}, {place}: median {median:.5f}, maximum {worst:.5f}")  # pytest -rP
    assert away.float().mean() > 0.3  # else the maximum says little
    assert median <= (EXACT if place == "ref" else MEDIAN)
    assert worst <= (EXACT if place == "ref" else MOST)


@pytest.mark.parametrize("row", WRONG_HEADS)
def test_what_no_gpu_kernel_has_is_refused(row: str, checkpoint: Checkpoints) -> None:
    family, config = ROWS[row]
    made = checkpoint(family, gains=GAINS, **config)
    with pytest.raises(PykernelsError, match="attention on a GPU has no (heads|latents) of"):
        with engine_at("cuda experts gpu", made.path):
            pass
