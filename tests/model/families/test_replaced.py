"""Weights that are replaced while an engine runs: what the next step reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import model
from model.llm import LLM
from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams

from ..checks import Checkpoints
from .places import CHUNK, KERNELS, LENGTH
from .reference import truth_of
from .rows import ROWS
from .test_logprobs import EXACT, GAINS, MEDIAN, errors

HOW: Any = {"temperature": 0, "max_tokens": 1, "logprobs": 20, "logprob_start": 1}


def llm_at(place: str, folder: Path) -> LLM:
    sizes: Any = {"max_model_len": LENGTH, "max_num_batched_tokens": CHUNK, "max_num_logits": CHUNK}
    where: Any = {"device": "ref"} if place == "ref" else {"kernel": place}
    return model.load_engine(folder, max_num_seqs=2, **sizes, **where)


def median_error(llm: LLM, reference: Any, prompt: list[int]) -> torch.Tensor:
    [result] = llm.engine.generate([prompt], SamplingParams(**HOW))
    found = result.completions[0].prompt_logprobs
    return errors(found, truth_of(reference, prompt).logprobs[:-1]).median()


@pytest.mark.parametrize("place", ["ref", KERNELS[0]])
@pytest.mark.parametrize("row", ["deepseek_v3", "qwen3_moe, tied", "qwen3_next"])
def test_a_model_becomes_another_between_two_steps(
    row: str, place: str, checkpoint: Checkpoints
) -> None:
    """Every parameter of it: vectors, stacked matrices, heads, MLPs, experts, what is tied, and
    what is changed while it is loaded."""
    family, config = ROWS[row]
    gains = GAINS._replace(embedding=0.02) if "tied" in row else GAINS
    first, other = (checkpoint(family, gains=gains, seed=seed, **config) for seed in (0, 1))
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(2, config["vocab_size"], (2, 70), generator=generator)
    prompts = tokens.tolist()  # nothing of one is cached
    bound = EXACT if place == "ref" else MEDIAN
    with llm_at(place, first.path) as llm:
        assert median_error(llm, first.reference, prompts[0]) <= bound
        store = llm.runner.weights
        for name, values in other.stored.items():
            store.replace(name, values)
        assert median_error(llm, other.reference, prompts[1]) <= bound


BAD = [
    ("model.layers.1.mlp.experts.2.up_proj.weight", (40, 71), r"is \[40, 72\], not .* \[40, 71\]"),
    ("model.layers.1.mlp.experts.99.up_proj.weight", (40, 72), "no weight was made of"),
    ("model.layers.0.self_attn.kv_b_proj.weigth", (4, 4), "Did you mean .*kv_b_proj.weight"),
    ("model.norm.weight", (72, 1), r"is \[72\]"),
]


def test_what_cannot_be_replaced_is_named_and_nothing_is_changed(checkpoint: Checkpoints) -> None:
    family, config = ROWS["deepseek_v3"]
    made = checkpoint(family, gains=GAINS, seed=0, **config)
    with llm_at("ref", made.path) as llm:
        store = llm.runner.weights
        for name, shape, told in BAD:
            with pytest.raises(PykernelsError, match=told):
                store.replace(name, torch.zeros(shape))
        # A GPU has this one in a layout of its own, too.
        spec = store._specs["model.norm.weight"]
        store._made[spec.name, "cuda:0", "vector"] = torch.zeros(72, device="meta")
        with pytest.raises(PykernelsError, match="cannot be replaced in model.norm.* on cuda"):
            store.replace("model.norm.weight", torch.zeros(72))
        prompt = [*range(2, 72)]
        assert median_error(llm, made.reference, prompt) <= EXACT
