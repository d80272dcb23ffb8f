"""Generation: the same tokens as Hugging Face's, streamed, with honest figures and clear errors."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import model
from model.modules.moe import FusedMoE
from model.text import generate
from model.text.generate import GenerationStream, chat_prompt, generate_stream
from model.text.prompt import encode
from pykernels.errors import PykernelsError

from .tiny import Tiny

Checkpoints = Callable[..., Tiny]
PROMPT = "def f(x):"


def byte_tokenizer(bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """96 tokens: two special ones, and a byte each: the printable ones up to |, space, newline."""
    alphabet = [*map(chr, range(33, 125)), "Ġ", "Ċ"]  # as byte-level tokenizers write these two
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>")


@pytest.fixture(scope="module")
def lm(checkpoint: Checkpoints) -> PreTrainedModel:
    return model.from_pretrained(checkpoint("deepseek_v3").path)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def stream(lm: PreTrainedModel, tokenizer: Any, **options: Any) -> GenerationStream:
    return generate_stream(lm, tokenizer, options.pop("prompt", PROMPT), **options)


@pytest.fixture
def never_stops(lm: PreTrainedModel) -> Any:
    """The same model without an end-of-text token, so that the length is known."""
    before = lm.generation_config.eos_token_id
    lm.generation_config.eos_token_id = None
    yield lm
    lm.generation_config.eos_token_id = before


@pytest.mark.parametrize("prompt", [PROMPT, "x", "import os\nimport sys"])
def test_greedy_text_is_transformers_own(
    never_stops: PreTrainedModel, tokenizer: Any, prompt: str
) -> None:
    lm = never_stops
    found = stream(lm, tokenizer, prompt=prompt, max_new_tokens=24)
    text = "".join(found)
    inputs = tokenizer(prompt, return_tensors="pt")
    want = lm.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert found.token_ids == want.tolist()
    assert text == tokenizer.decode(want, skip_special_tokens=True)
    assert found.prompt_ids == inputs.input_ids[0].tolist()


def test_it_stops_at_the_end_of_text(lm: PreTrainedModel, tokenizer: Any) -> None:
    config = lm.generation_config
    before = config.eos_token_id
    try:
        config.eos_token_id = None
        free = stream(lm, tokenizer, max_new_tokens=12)
        list(free)
        config.eos_token_id = [95, free.token_ids[4]]
        first = free.token_ids.index(free.token_ids[4])
        stopped = stream(lm, tokenizer, max_new_tokens=12)
        list(stopped)
    finally:
        config.eos_token_id = before
    assert stopped.token_ids == free.token_ids[: first + 1]


def test_figures(never_stops: PreTrainedModel, tokenizer: Any) -> None:
    lm = never_stops
    found = stream(lm, tokenizer, max_new_tokens=9)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = found.stats
    list(found)
    stats = found.stats
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.new_tokens == 9
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.decode_tokens_per_second == pytest.approx(8 / stats.decode_seconds)
    assert stats.prefill_tokens_per_second == pytest.approx(len(PROMPT) / stats.prefill_seconds)
    # 8 steps after the first token, in 2 layers, 3 experts each of 3 matrices of bf16.
    (block, *_) = [m for m in lm.modules() if isinstance(m, FusedMoE)]
    assert block.routed is not None
    expert = block.routed.weights.bytes_per_expert
    assert expert >= 3 * 32 * 64 * 2
    assert stats.expert_bytes == 8 * 2 * 3 * expert
    assert 0 < stats.expert_seconds < stats.decode_seconds
    assert stats.expert_gb_per_second == pytest.approx(
        stats.expert_bytes / stats.expert_seconds / 1e9
    )


def test_pieces_come_while_the_model_works(
    never_stops: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    forward = FusedMoE.forward

    def counting(self: FusedMoE, x: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return forward(self, x)

    monkeypatch.setattr(FusedMoE, "forward", counting)
    found = stream(never_stops, tokenizer, max_new_tokens=100)
    next(found)
    found.close()
    assert steps < 100  # 2 layers: closed long before all 100 tokens
    assert 1 <= found.stats.new_tokens < 50
    assert list(found) == []


def test_ctrl_c_stops_the_model(
    never_stops: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = FusedMoE.forward

    def slow(self: FusedMoE, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return forward(self, x)

    monkeypatch.setattr(FusedMoE, "forward", slow)
    found = stream(never_stops, tokenizer, max_new_tokens=100)
    next(found)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(found)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert found.stats.new_tokens < 50
    assert not [t for t in threading.enumerate() if t.name == "generate"]


def test_an_error_of_the_model_reaches_the_reader(
    lm: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PykernelsError("it broke", "hint it")

    monkeypatch.setattr(FusedMoE, "forward", fail)
    with pytest.raises(PykernelsError, match="it broke. hint it."):
        list(stream(lm, tokenizer, max_new_tokens=4))


def test_sampling_follows_the_seed_and_leaves_the_random_state(
    never_stops: PreTrainedModel, tokenizer: Any
) -> None:
    def sample(seed: int | None, **options: Any) -> list[int]:
        found = stream(
            never_stops, tokenizer, max_new_tokens=16, temperature=1.5, seed=seed, **options
        )
        list(found)
        return found.token_ids

    state = torch.get_rng_state()
    one = sample(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert sample(1) == one
    assert sample(2) != one
    greedy = stream(never_stops, tokenizer, max_new_tokens=16)
    list(greedy)
    assert sample(3, top_k=1) == greedy.token_ids
    assert sample(3, top_p=1e-6) == greedy.token_ids
    torch.manual_seed(5)
    free = sample(None)
    torch.manual_seed(5)
    assert sample(None) == free


def test_the_checkpoints_own_settings_hold(never_stops: PreTrainedModel, tokenizer: Any) -> None:
    config = never_stops.generation_config
    plain = stream(never_stops, tokenizer, max_new_tokens=6)
    list(plain)
    before = config.suppress_tokens
    try:
        config.suppress_tokens = plain.token_ids
        found = stream(never_stops, tokenizer, max_new_tokens=6)
        list(found)
    finally:
        config.suppress_tokens = before
    assert not set(found.token_ids) & set(plain.token_ids)


def test_the_text_is_of_one_beam_whatever_the_checkpoint_asks_for(
    never_stops: PreTrainedModel, tokenizer: Any
) -> None:
    want = "".join(stream(never_stops, tokenizer, max_new_tokens=6, temperature=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(never_stops.generation_config, "num_beams", 3)  # which cannot be streamed
        found = stream(never_stops, tokenizer, max_new_tokens=6, temperature=0)
        assert "".join(found) == want


def test_nothing_is_warned_about(lm: PreTrainedModel, tokenizer: Any, caplog: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.generation_config, "temperature", 0.6)
        patch.setattr(lm.generation_config, "top_p", 0.95)
        list(stream(lm, tokenizer, max_new_tokens=2))
    assert caplog.text == ""


OPTIONS = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0. Set it to 1 or more"),
    ({"temperature": -1.0}, "temperature is -1.0. Set it to 0 or more"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": 1e-40}, "temperature is 1e-40. Set it to 0, or 1e-30 or more"),
    ({"top_p": 0.0}, "top_p is 0.0. Set it to above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_k": -1}, "top_k is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616. Set it to a number below"),
    ({"prompt": "\udcff"}, "The prompt holds bytes that are no UTF-8 text. Give it as UTF-8"),
    ({"prompt": "x" * 128}, "The prompt has 128 tokens, the model's context is 128. Shorten"),
    ({"prompt": "x" * 500}, "The prompt has 500 tokens"),
    (
        {"prompt": "x" * 100, "max_new_tokens": 29},
        "100 tokens and 29 new ones do not fit the model's context of 128. Ask for at most 28 new",
    ),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=[said for _, said in OPTIONS])
def test_bad_options_are_told_before_any_work(
    lm: PreTrainedModel,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(FusedMoE, "forward", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(PykernelsError, match=said):
        stream(lm, tokenizer, **options)


def test_the_context_may_be_filled_to_the_last_token(
    never_stops: PreTrainedModel, tokenizer: Any
) -> None:
    found = stream(never_stops, tokenizer, prompt="x" * 125, max_new_tokens=3)
    list(found)
    assert found.stats.new_tokens == 3


def test_an_empty_prompt_begins_with_the_first_token(
    lm: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stream(lm, tokenizer, prompt="", max_new_tokens=3)
    list(found)
    assert found.prompt_ids == [tokenizer.bos_token_id] == [0]
    bare = byte_tokenizer(bos=None)
    assert encode(lm, bare, "") == [lm.config.bos_token_id]
    monkeypatch.setattr(lm.config, "bos_token_id", None)
    with pytest.raises(PykernelsError, match="The prompt is empty"):
        stream(lm, bare, prompt="")


def test_a_written_out_first_token_is_not_doubled(lm: PreTrainedModel) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    plain = encode(lm, tokenizer, "hi")
    assert plain[0] == 0
    assert encode(lm, tokenizer, "<s>hi") == plain


def test_chat_prompts() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
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


def test_left_padding_does_not_change_a_row(checkpoint: Checkpoints, ids: torch.Tensor) -> None:
    lm = model.from_pretrained(checkpoint("deepseek_v3").path, dtype="float32")
    lm.generation_config.eos_token_id = None
    long, short = ids[0, :12], ids[1, :5]
    batch = torch.stack([long, torch.cat([torch.zeros(7, dtype=torch.int64), short])])
    mask = (torch.arange(12) >= torch.tensor([[0], [7]])).long()
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    together = lm.generate(batch, attention_mask=mask, **greedy)[:, 12:]
    alone = [
        lm.generate(row[None], attention_mask=torch.ones_like(row[None]), **greedy)[0, len(row) :]
        for row in (long, short)
    ]
    assert together.tolist() == [row.tolist() for row in alone]


def test_the_cache_changes_nothing(checkpoint: Checkpoints, ids: torch.Tensor) -> None:
    lm = model.from_pretrained(checkpoint("deepseek_v3").path, dtype="float32")
    lm.generation_config.eos_token_id = None
    with_cache, without = (
        lm.generate(ids, max_new_tokens=8, do_sample=False, use_cache=use, pad_token_id=0)
        for use in (True, False)
    )
    assert with_cache.tolist() == without.tolist()


MODES: list[tuple[str, dict[str, Any]]] = [
    ("beam search", {"num_beams": 3}),
    ("sampling", {"do_sample": True, "top_k": 5}),
    ("several continuations", {"do_sample": True, "num_return_sequences": 2}),
]


@pytest.mark.parametrize(("name", "options"), MODES, ids=[row[0] for row in MODES])
def test_transformers_other_ways_to_generate_work(
    lm: PreTrainedModel, ids: torch.Tensor, name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    found = lm.generate(ids, max_new_tokens=5, min_new_tokens=5, pad_token_id=0, **options)
    rows = 2 * options.get("num_return_sequences", 1)
    assert found.shape == (rows, 17 + 5), name


def test_the_first_token_parts_prefill_from_decoding(lm: PreTrainedModel) -> None:
    tokens = generate._Tokens(lm)
    tokens.started, tokens.first, tokens.last = 10.0, 10.5, 12.0
    found = tokens.stats(prompt_tokens=6, new_tokens=4)
    assert (found.prefill_seconds, found.decode_seconds) == (0.5, 1.5)
    assert (found.prefill_tokens_per_second, found.decode_tokens_per_second) == (12.0, 2.0)
