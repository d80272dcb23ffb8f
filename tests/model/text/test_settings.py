"""generation_config.json on the engine: transformers' tokens, or a line with what is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import model
from model.engine_stream import engine_stream
from model.llm import LLM
from model.text.settings import engine_settings, with_defaults
from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams

from .. import tiny
from ..checks import byte_tokenizer

PROMPT = [20, 30, 40, 20, 30, 40, 20]
PENALTY = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint with a penalty and an n-gram limit; transformers' own float32 model."""
    path = tmp_path_factory.mktemp("settings")
    made = tiny.make(path, "mixtral", max_position_embeddings=256, eos_token_id=None)
    byte_tokenizer().save_pretrained(path)
    config = {"repetition_penalty": PENALTY, "no_repeat_ngram_size": 9, "max_new_tokens": 24}
    (path / "generation_config.json").write_text(json.dumps(config))
    return path, made.reference


@pytest.fixture(scope="module")
def llm(folder: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with pytest.warns(UserWarning, match="generates without no_repeat_ngram_size=9 of"):
        made = model.load_engine(folder[0], device="ref", threads=1, max_model_len=128)
    with made:
        yield made


def transformers_tokens(lm: PreTrainedModel, **settings: Any) -> list[int]:
    """Greedily, with these settings and no others."""
    config = GenerationConfig(**{"eos_token_id": None, "pad_token_id": 0, **settings})
    lm.generation_config = GenerationConfig()
    ids = torch.tensor([PROMPT])
    return lm.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
        0, len(PROMPT) :
    ].tolist()


def test_the_file_holds_in_every_way_to_generate(
    llm: LLM, folder: tuple[Path, PreTrainedModel]
) -> None:
    truth = transformers_tokens(folder[1], repetition_penalty=PENALTY, max_new_tokens=24)
    plain = transformers_tokens(folder[1], max_new_tokens=24)
    assert truth != plain
    assert list(llm.generate(PROMPT, temperature=0).token_ids) == truth
    assert list(llm.submit(PROMPT, temperature=0).result().token_ids) == truth
    assert list(llm.generate(PROMPT, temperature=0, repetition_penalty=1.0).token_ids) == plain
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(truth, skip_special_tokens=True)
    assert "".join(llm.stream(PROMPT, temperature=0)) == text
    assert "".join(engine_stream(llm, PROMPT, max_new_tokens=24)) == text


def test_sampling_params_are_taken_as_they_are(
    llm: LLM, folder: tuple[Path, PreTrainedModel]
) -> None:
    with pytest.warns(UserWarning, match=r"without the repetition_penalty=1\.5 of the generation"):
        found = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
    assert list(found.token_ids) == transformers_tokens(folder[1], max_new_tokens=24)
    with pytest.raises(PykernelsError, match="params and seed were given"):
        llm.generate(PROMPT, SamplingParams(), seed=1)


def settings_of(lm: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Settings that each change what the tiny model writes."""
    plain = transformers_tokens(lm, max_new_tokens=16)
    often, third = max(set(plain), key=plain.count), plain[2]
    return {
        "repetition_penalty": {"repetition_penalty": 3.0},
        "suppress_tokens": {"suppress_tokens": [often, 4000]},
        "bad_words_ids": {"bad_words_ids": [[often], [plain[0]]]},
        "sequence_bias": {"sequence_bias": [[[often], -2.0], [[7], 1.0]]},
        "max_length": {"max_length": len(PROMPT) + 5, "max_new_tokens": None},
        "eos_token_id": {"eos_token_id": [third, 95]},
        "min_new_tokens": {"eos_token_id": [plain[0], third], "min_new_tokens": 6},
        "min_length": {"eos_token_id": plain[0], "min_length": len(PROMPT) + 4},
        "temperature": {"do_sample": False, "temperature": None, "top_k": 3},
    }


SETTINGS = (
    "repetition_penalty",
    "suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "max_length",
    "eos_token_id",
    "min_new_tokens",
    "min_length",
    "temperature",
)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_transformers(
    name: str, llm: LLM, folder: tuple[Path, PreTrainedModel]
) -> None:
    lm = folder[1]
    given = {"max_new_tokens": 16, **settings_of(lm)[name]}
    truth = transformers_tokens(lm, **given)
    assert truth != transformers_tokens(lm, max_new_tokens=16) or name == "temperature"
    eos = given.get("eos_token_id") or []
    ends = eos if isinstance(eos, list) else [eos]
    settings = engine_settings(GenerationConfig(**given), ends, 96, text=True)
    assert settings.not_done == {}
    params = settings.params(len(PROMPT), temperature=0, stop_token_ids=ends)
    assert list(llm.engine.generate([PROMPT], params)[0].token_ids) == truth


def test_settings_that_need_no_model() -> None:
    def of(**values: Any) -> Any:
        return engine_settings(GenerationConfig(**values), [1], 96, text=True)

    assert of(do_sample=False, temperature=0.7, typical_p=0.5).fields == {"temperature": 0}
    sampled = of(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1).params(3)
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (0.7, 5, 0.9, 0.1)
    assert of(stop_strings=["a", "b"], max_time=2.5).params(3).stop == ("a", "b")
    assert of(max_time=2.5).params(3).deadline == 2.5
    # transformers drops a bad word that is an end token
    assert of(bad_words_ids=[[1], [2]]).params(3).logit_bias == {2: -math.inf}
    long = of(max_new_tokens=1000)
    assert (long.params(3).max_tokens, long.params(3, 128).max_tokens) == (1000, 125)
    assert long.params(3, 128, max_tokens=500).max_tokens == 500  # which the engine refuses
    given = of(suppress_tokens=[2]).params(3, logit_bias={3: 1.0})
    assert given.logit_bias == {2: -math.inf, 3: 1.0}
    not_done = of(
        num_beams=4,
        typical_p=0.5,
        bad_words_ids=[[1, 2]],
        forced_eos_token_id=1,
        begin_suppress_tokens=[3],
    ).not_done
    assert set(not_done) == {
        "num_beams",
        "typical_p",
        "bad_words_ids",
        "forced_eos_token_id",
        "begin_suppress_tokens",
    }
    with pytest.raises(PykernelsError, match="config has repetition_penalty=0 cannot be"):
        of(repetition_penalty=0)
    with pytest.raises(PykernelsError, match="the generation config cannot be read"):
        of(bad_words_ids=[1])
    for values in ({"max_length": "a"}, {"min_length": -1}, {"do_sample": "no"}):
        with pytest.raises(PykernelsError, match="the generation config has .* cannot be used"):
            of(**values)


def test_the_command_line_asks_the_file_first() -> None:
    none = {"temperature": None, "top_p": None, "top_k": None, "seed": 3}
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20)
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": 3}
    assert with_defaults(none, config) == own
    assert with_defaults({**none, "top_k": 1}, config) == {**own, "top_k": 1}
    assert with_defaults(none, GenerationConfig(do_sample=False))["temperature"] == 0
    assert with_defaults(none, None) == {**own, "temperature": 0.8, "top_k": 0}
