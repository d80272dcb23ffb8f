"""Streaming text: the pieces joined are the whole, and no piece holds half a character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from model.text.detokenize import Detokenizer, token_bytes


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII is spread over 2 to 4 of them."""
    vocabulary = {t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's decoder: words, and every other character as its bytes."""
    words = ["<unk>", "▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """Words whose decoding depends on what stands before: no space at the start of a text."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "▁sat", "."]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES, WORDS, FALLBACK = byte_level(), metaspace(), byte_fallback()


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


TAIL = st.lists(st.sampled_from([*range(1, 4), "é", "日", "🙂", " "]), max_size=12)


@settings(max_examples=100, deadline=None)
@given(TAIL)
def test_words_and_bytes_join_to_the_whole(parts: list[int | str]) -> None:
    ids = [
        token
        for part in parts
        for token in ([part] if isinstance(part, int) else [4 + byte for byte in part.encode()])
    ]
    assert "".join(pieces(FALLBACK, ids)) == whole(FALLBACK, ids)


@pytest.mark.parametrize("data", [b"\xe6\x97\xa5\xf0\x9f", b"ab\xf0", b"\xa0\xa1", b"\xf0\x9f\x41"])
def test_a_character_that_is_cut_is_one_replacement(data: bytes) -> None:
    """As Python has it; whole characters before it stay."""
    right = data.decode(errors="replace")
    assert "".join(pieces(FALLBACK, [4 + byte for byte in data])) == right
    letters = [BYTES.convert_tokens_to_ids(letter) for letter in map(bytes_to_unicode().get, data)]
    assert "".join(pieces(BYTES, letters)) == right == whole(BYTES, letters)


def test_text_goes_on_behind_bytes_that_are_no_text() -> None:
    ids = [1, *(4 + byte for byte in b"\xe6\x97\xa5\xf0\x9f"), 1, 2]
    assert pieces(FALLBACK, ids) == ["a", "", "", "日", "", "", "\ufffd a", "b", ""]


def test_tokens_without_text_cost_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens, and ids that no token has: as many of them as may come."""
    words = metaspace()
    words.add_special_tokens({"eos_token": "</s>"})
    asked: list[int] = []

    def decode(ids: list[int], **options: Any) -> str:
        asked.append(len(ids))
        return PreTrainedTokenizerFast.decode(words, ids, **options)

    monkeypatch.setattr(words, "decode", decode)
    ids = [1, *[words.eos_token_id, 4000] * 500, 2]
    assert "".join(pieces(words, ids)) == "the cat"
    assert sum(asked) <= 8


def test_special_tokens_that_are_kept_are_written() -> None:
    """Between halves of a character too; all others are left out."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|end|>"]})
    ids = tokenizer("a<|call|>é<|end|>b</s>")["input_ids"]
    text = Detokenizer(tokenizer, ["<|call|>", "</s>", "no token"])
    shown = "".join([*map(text.push, ids), text.finish()])
    assert shown == tokenizer.decode(ids).replace("<|end|>", "") == "a<|call|>éb</s>"


ADDED = ["<x>", "õ", "ß", "é日", "日本", "▁▁", " a", "\n\n", "Ġ"]


@pytest.mark.parametrize("made", [byte_level, byte_fallback, metaspace])
def test_added_tokens_are_the_text_that_they_are_made_from(made: Any) -> None:
    """As the tokenizer decodes them; of a byte-level one, what it would take for bytes."""
    tokenizer = made()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    before = tokenizer.convert_tokens_to_ids("b" if made is not metaspace else "s")
    for text in ADDED:
        ids = [before, tokenizer.convert_tokens_to_ids(text), before]
        right = whole(tokenizer, ids)
        if made is byte_level and text in ("õ", "ß"):
            assert "\ufffd" in right
            right = f"b{text}b"
        assert "".join(pieces(tokenizer, ids)) == right
        assert token_bytes(tokenizer, ids[1]).decode() == right[1:-1]
