"""Generation: the same tokens as Hugging Face's, streamed, with honest figures and clear errors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import model
from model.modules.moe import FusedMoE, routed_experts
from model.text.generate import GenerationStream, chat_prompt, generate_stream
from model.text.prompt import encode, encode_chat
from pykernels.errors import PykernelsError

from ..checks import Checkpoints, byte_tokenizer

PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def loaded(checkpoint: Checkpoints) -> PreTrainedModel:
    return model.from_pretrained(checkpoint("deepseek_v3").path)


@pytest.fixture
def lm(loaded: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Without an end-of-text token, so that the length is known; its settings are put back."""
    before = copy.deepcopy(loaded.generation_config)
    loaded.generation_config.eos_token_id = None
    yield loaded
    loaded.generation_config = before


def stream(lm: PreTrainedModel, tokenizer: Any, **options: Any) -> GenerationStream:
    return generate_stream(lm, tokenizer, options.pop("prompt", PROMPT), **options)


def tokens(lm: PreTrainedModel, tokenizer: Any, **options: Any) -> list[int]:
    found = stream(lm, tokenizer, **options)
    list(found)
    return found.token_ids


def test_greedy_text_is_transformers_own(lm: PreTrainedModel, tokenizer: Any) -> None:
    found = stream(lm, tokenizer, max_new_tokens=16)
    text = "".join(found)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    want = lm.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert found.token_ids == want.tolist()
    assert text == tokenizer.decode(want, skip_special_tokens=True)
    assert found.prompt_ids == inputs.input_ids[0].tolist()


def test_it_stops_at_the_end_of_text(lm: PreTrainedModel, tokenizer: Any) -> None:
    free = tokens(lm, tokenizer, max_new_tokens=8)
    lm.generation_config.eos_token_id = [95, free[4]]
    assert tokens(lm, tokenizer, max_new_tokens=8) == free[: free.index(free[4]) + 1]


def test_figures(lm: PreTrainedModel, tokenizer: Any) -> None:
    found = stream(lm, tokenizer, max_new_tokens=9)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = found.stats
    list(found)
    stats = found.stats
    assert (stats.prompt_tokens, stats.new_tokens) == (len(PROMPT), 9)
    assert stats.prefill_seconds > 0
    assert stats.decode_tokens_per_second == pytest.approx(8 / stats.decode_seconds)
    # 8 steps after the first token, in 2 layers, 3 experts each of 3 matrices of bf16.
    expert = routed_experts(lm)[0].weights.bytes_per_expert
    assert expert >= 3 * 32 * 64 * 2
    assert stats.read_bytes == 8 * 2 * 3 * expert
    assert 0 < stats.read_seconds < stats.decode_seconds


def test_closing_stops_the_model(lm: PreTrainedModel, tokenizer: Any) -> None:
    found = stream(lm, tokenizer, max_new_tokens=100)
    next(found)  # the first piece comes long before the last token
    found.close()
    assert 1 <= found.stats.new_tokens < 50
    assert list(found) == []
    assert not [t for t in threading.enumerate() if t.name == "generate"]


def test_an_error_of_the_model_reaches_the_reader(
    lm: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PykernelsError("it broke", "hint it")

    monkeypatch.setattr(FusedMoE, "forward", fail)
    with pytest.raises(PykernelsError, match="it broke. hint it."):
        list(stream(lm, tokenizer, max_new_tokens=4))


def test_sampling_follows_the_seed(lm: PreTrainedModel, tokenizer: Any) -> None:
    def sample(seed: int | None, **options: Any) -> list[int]:
        options = {"max_new_tokens": 8, "temperature": 1.5, "seed": seed, **options}
        return tokens(lm, tokenizer, **options)

    state = torch.get_rng_state()
    one = sample(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert sample(1) == one
    assert sample(2) != one
    greedy = tokens(lm, tokenizer, max_new_tokens=8)
    assert sample(3, top_k=1) == sample(3, top_p=1e-6) == greedy
    torch.manual_seed(5)
    free = sample(None)
    torch.manual_seed(5)
    assert sample(None) == free


def test_the_checkpoints_own_settings_hold(
    lm: PreTrainedModel, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = lm.generation_config
    plain = tokens(lm, tokenizer, max_new_tokens=6)
    config.num_beams = 3  # except those that cannot be streamed, or were given
    config.temperature, config.top_p = 0.6, 0.95
    assert tokens(lm, tokenizer, max_new_tokens=6, temperature=0) == plain
    config.suppress_tokens = plain
    assert not set(tokens(lm, tokenizer, max_new_tokens=6)) & set(plain)
    assert caplog.text == ""


# fmt: off
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0. Set it to 1 or more"),
    ({"temperature": -1.0}, "temperature is -1.0. Set it to 0 or more"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": 1e-40}, "temperature is 1e-40. Set it to 0, or 1e-30 or more"),
    ({"top_p": 0.0}, "top_p is 0.0. Set it to above 0 and at most 1"),
    ({"top_k": -1}, "top_k is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616. Set it to a number below"),
    ({"prompt": "\udcff"}, "The prompt holds bytes that are no UTF-8 text. Give it as UTF-8"),
    ({"prompt": "x" * 128}, "The prompt has 128 tokens, the model's context is 128. Shorten"),
    ({"prompt": "x" * 100, "max_new_tokens": 29},
     "100 tokens and 29 new ones do not fit the model's context of 128. Ask for at most 28 new"),
]
# fmt: on


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[m for _, m in OPTIONS])
def test_bad_options_are_found_before_any_work(
    lm: PreTrainedModel, tokenizer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PykernelsError, match=message):
        stream(lm, tokenizer, **options)  # nothing runs before the first `next`


def test_the_context_may_be_filled(lm: PreTrainedModel, tokenizer: Any) -> None:
    assert len(tokens(lm, tokenizer, prompt="x" * 125, max_new_tokens=3)) == 3


def test_an_empty_prompt_begins_with_bos(
    lm: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encode(lm, tokenizer, "") == [tokenizer.bos_token_id] == [0]
    bare = byte_tokenizer(bos=None)
    assert encode(lm, bare, "") == [lm.config.bos_token_id]
    monkeypatch.setattr(lm.config, "bos_token_id", None)
    with pytest.raises(PykernelsError, match="The prompt is empty"):
        stream(lm, bare, prompt="")


def test_bos_that_is_written_out_is_not_doubled(lm: PreTrainedModel) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    plain = encode(lm, tokenizer, "hi")
    assert plain[0] == 0
    assert encode(lm, tokenizer, "<s>hi") == plain


def test_chat_prompts() -> None:
    said = {"system": "Be brief.", "user": "Hello"}
    messages = [{"role": role, "content": content} for role, content in said.items()]
    tokenizer = byte_tokenizer()
    assert chat_prompt(tokenizer, messages) == "System: Be brief.\nUser: Hello\nAssistant:"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert chat_prompt(tokenizer, messages) == "[system]Be brief.[user]Hello[assistant]"
    tokenizer.chat_template = "{{ raise_exception('only user and assistant roles') }}"
    with pytest.raises(PykernelsError, match="refuses this .*only user and assistant .*--system"):
        chat_prompt(tokenizer, messages)
    for template, cause in {
        "{{ 1 + 'a' }}": "TypeError: unsupported operand",
        "{{ messages[7].content }}": "has no element 7",
        "{% for %}": "Expected an expression",
        "{{ 1 // 0 }}": "ZeroDivisionError",
    }.items():
        tokenizer.chat_template = template
        with pytest.raises(PykernelsError, match=cause) as raised:
            chat_prompt(tokenizer, messages)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("start", ["", "<s>"], ids=["without bos", "with bos"])
def test_a_conversation_has_the_ids_of_transformers(lm: PreTrainedModel, start: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokenizer = both_ends()
    tokenizer.chat_template = start + "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    truth = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert encode_chat(lm, tokenizer, messages) == truth["input_ids"]
    with pytest.raises(PykernelsError, match="no UTF-8 text"):
        encode_chat(lm, tokenizer, [{"role": "user", "content": "\udcff"}])
    tokenizer.chat_template = None
    assert encode_chat(lm, tokenizer, messages) == encode(lm, tokenizer, "User: Hello\nAssistant:")


def test_what_is_put_behind_a_text_is_left_out_of_a_prompt(lm: PreTrainedModel) -> None:
    tokenizer, plain = both_ends(), byte_tokenizer()
    assert tokenizer("hi")["input_ids"] == [0, *plain("hi")["input_ids"], 1]
    assert encode(lm, tokenizer, "hi") == [0, *plain("hi")["input_ids"]]
    assert encode(lm, tokenizer, "hi</s>") == [0, *plain("hi")["input_ids"], 1]
    assert encode(lm, tokenizer, "") == [0]


def both_ends() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def test_stop_strings_of_the_checkpoint_end_the_text(lm: PreTrainedModel, tokenizer: Any) -> None:
    text = "".join(stream(lm, tokenizer, max_new_tokens=12))
    lm.generation_config.stop_strings = [text[3:5]]
    assert "".join(stream(lm, tokenizer, max_new_tokens=12)) == text[: text.index(text[3:5]) + 2]
