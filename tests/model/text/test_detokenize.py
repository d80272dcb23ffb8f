"""Streaming text: the pieces joined are the whole, and no piece holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model.text.detokenize import Detokenizer


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII is spread over 2 to 4 of them."""
    vocabulary = {t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def metaspace() -> PreTrainedTokenizerFast:
    """Words whose decoding depends on what stands before: no space at the start of a text."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "▁sat", "."]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES, WORDS = byte_level(), metaspace()


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    text = Detokenizer(tokenizer)
    return [*(text.push(token) for token in ids), text.finish()]


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


TEXTS = ["plain", "naïve café", "日本語", "🙂🙃 👩\u200d👩", "\n\t \r\n", "\ufffd real", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_is_whole_characters(text: str) -> None:
    found = pieces(BYTES, BYTES(text)["input_ids"])
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


def test_pieces_come_as_soon_as_they_are_whole() -> None:
    text = Detokenizer(BYTES)
    assert [text.push(token) for token in BYTES("abc")["input_ids"]] == ["a", "b", "c"]
    assert pieces(BYTES, BYTES("é")["input_ids"][:1]) == ["", "\ufffd"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_join_to_the_whole(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == whole(BYTES, ids)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=12))
def test_spaces_survive(ids: list[int]) -> None:
    assert "".join(pieces(WORDS, ids)) == whole(WORDS, ids)
