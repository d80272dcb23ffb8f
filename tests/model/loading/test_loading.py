"""What `load_engine` is given, and under which modes of torch it loads and generates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import model
from pykernels.errors import PykernelsError

from .. import tiny

QUICK: dict[str, Any] = {"kernel": "generic"}
SIZES: dict[str, Any] = {
    "max_position_embeddings": 512,
    "qk_nope_head_dim": 24,
}  # no keys are expanded
PROMPT = list(range(5, 45))
Mode = type[torch.inference_mode] | type[torch.no_grad] | type[contextlib.nullcontext[None]]
PAIRS: list[tuple[Mode, Mode]] = [
    (torch.inference_mode, torch.inference_mode),
    (torch.inference_mode, contextlib.nullcontext),
    (contextlib.nullcontext, torch.inference_mode),
    (torch.no_grad, torch.no_grad),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.make(tmp_path_factory.mktemp("loading"), "deepseek_v3", **SIZES)


def truth(made: tiny.Tiny, tokens: int) -> list[int]:
    """Greedy tokens of transformers' own model."""
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    return made.reference.generate(ids, **settings)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("device", ["cpu", "ref"])
@pytest.mark.parametrize(("loading", "generating"), PAIRS)
def test_any_mode_of_gradients(
    loading: Mode, generating: Mode, device: str, made: tiny.Tiny
) -> None:
    with loading():
        llm = model.load_engine(made.path, max_model_len=64, threads=1, device=device, **QUICK)
    with llm, generating():
        found = llm.generate(PROMPT, temperature=0, max_tokens=3, ignore_eos=True).token_ids
    # The CPU's inputs of matrices are bfloat16, so a near-tie may go otherwise there.
    assert len(found) == 3 and (device == "cpu" or list(found) == truth(made, 3))


@pytest.mark.parametrize(("loading", "running"), PAIRS)
def test_any_mode_of_gradients_eagerly(loading: Mode, running: Mode, made: tiny.Tiny) -> None:
    with loading():
        lm = model.from_pretrained(made.path, dtype="float32", threads=1)
    ids = torch.tensor([PROMPT])
    with running():
        found = lm(ids).logits[0]
    with torch.no_grad():
        error = (found - made.reference(ids).logits[0]).norm(dim=-1)
    assert error.median() < 0.05 * made.reference(ids).logits[0].norm(dim=-1).median()


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_dtype(request.param)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


LONG = [2 + i * i % 94 for i in range(400)]


@pytest.fixture(scope="module")
def long_truth(made: tiny.Tiny) -> torch.Tensor:
    """Logprobs of the tokens of LONG but the first, by transformers' own model."""
    ids = torch.tensor([LONG])
    with torch.no_grad():
        logprobs = made.reference(ids).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_defaults_of_torch_change_no_logprob(
    device: str, made: tiny.Tiny, long_truth: torch.Tensor, other_defaults: None
) -> None:
    """Of a prompt longer than 256 tokens, which each read a factor of the dense MLP."""
    options: dict[str, Any] = {
        "max_model_len": 512,
        "threads": 1,
        "max_num_logits": 512,
        "device": device,
        **QUICK,
    }
    with model.load_engine(made.path, **options) as llm:
        result = llm.generate(LONG, temperature=0, max_tokens=1, logprobs=0, logprob_start=1)
    (output,) = result.completions
    scores = [each.logprob for each in output.prompt_logprobs]
    found = torch.tensor(scores, dtype=torch.float32, device="cpu")
    error = (found - long_truth).abs()
    assert error.median() < (0.1 if device == "cpu" else 1e-3)
    assert error[300:].median() < (0.1 if device == "cpu" else 1e-3)


WRONG: list[dict[str, Any]] = [
    {"max_num_seqs": 0},
    {"max_num_seqs": -1},
    {"max_num_seqs": 1 << 40},
    {"max_num_batched_tokens": 0},
    {"max_num_batched_tokens": 1.5},
    {"max_num_batched_tokens": 1 << 40},
    {"max_num_logits": 0},
    {"max_num_logits": "4"},
    {"max_model_len": 0},
    {"max_model_len": -5},
    {"max_model_len": 1 << 40},
    {"max_model_len": "64"},
    {"threads": 0},
    {"threads": -1},
    {"threads": 1 << 20},
    {"threads": "two"},
    {"max_num_seqs": True},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_setting_that_cannot_be_is_one_line(wrong: dict[str, Any], made: tiny.Tiny) -> None:
    with pytest.raises(PykernelsError) as raised:
        model.load_engine(made.path, **wrong)
    ((name, value),) = wrong.items()
    assert str(value).strip("'") in raised.value.cause and name in str(raised.value)


def test_workers_that_have_ended_end_the_engine(made: tiny.Tiny) -> None:
    with model.load_engine(made.path, max_model_len=64, threads=1, **QUICK) as llm:
        llm.pool.close()
        with pytest.raises(PykernelsError, match="pool .* is closed"):
            llm.generate(PROMPT, max_tokens=1)
        assert not llm.engine.healthy
