"""Token ids to text, piece by piece and in whole characters."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The bytes that byte-level tokenizers write as letters (GPT-2's)."""
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A byte of a sentencepiece vocabulary."""


class Detokenizer:
    """Incremental detokenization: push token ids, get the text that they complete.

    Tokens may end inside a character; what is incomplete is held back. Where the tokenizer shows
    the bytes of its tokens they are decoded here, one after the other, and what is no UTF-8 becomes
    U+FFFD as in `bytes.decode(errors="replace")`. All other tokens are decoded by the tokenizer,
    which may write a token differently at the start of a text: a piece is the difference of two
    decodings that begin with the same ids. A push takes the same time however many came before.

    The pieces joined are the tokenizer's decoding of all ids, special tokens skipped, with two
    exceptions. Of bytes that are no UTF-8 in a sentencepiece vocabulary the tokenizer replaces the
    whole run, characters that are complete too. An added token of a byte-level vocabulary whose
    text happens to be letters for bytes, as DeepSeek's "õ", it
    takes for those bytes; here it is the text that it is made from, as in llama.cpp.

    Args:
        keep: special tokens that are written nevertheless, as they stand in the vocabulary: the
            markers that a parser looks for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._facts = _facts_of(tokenizer)
        self._kept = self._facts.ids_of(frozenset(keep)) if keep else {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # context, and the ids behind it that have given no text yet
        self._done = 0  # how many of them are context

    def push(self, token: int) -> str:
        """The text that `token` adds, or "" while a character is incomplete."""
        if (kept := self._kept.get(token)) is not None:
            return self._utf8.decode(b"", final=True) + self._held() + kept
        if self._facts.byte_level:
            return self._utf8.decode(self._facts.letters(token))
        written = self._facts.written(token)
        if not written:  # a special token, or one that is not in the vocabulary
            return ""
        if self._facts.byte_fallback and (match := _BYTE.fullmatch(written)):
            begun, rest = bool(self._ids), self._held()
            # As context one of them stands for all: only whether a text has begun matters.
            self._ids, self._done = [token], 1
            text = self._utf8.decode(bytes.fromhex(match[1]))
            if text == " " and not begun:
                text = self._decode(self._ids)  # which may drop a space at the start
            return rest + text
        rest = self._utf8.decode(b"", final=True)
        return rest + self._difference(token)

    def finish(self) -> str:
        """The rest of the text at the end; an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True) + self._held()

    def _held(self) -> str:
        """The text that the ids behind the context give when no other follows."""
        if self._done == len(self._ids):
            return ""
        text, before = self._decode(self._ids), self._decode(self._ids[: self._done])
        self._done = len(self._ids)
        return text[len(before) :]

    def _difference(self, token: int) -> str:
        self._ids.append(token)
        text, before = self._decode(self._ids), self._decode(self._ids[: self._done])
        if not text.startswith(before) or len(text) <= len(before):
            return ""
        # A real U+FFFD is held back too: only the next token shows whether it is incomplete.
        if text.endswith(_REPLACEMENT) and not self._facts.byte_fallback:
            return ""
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class _Facts:
    """What detokenizers of one tokenizer have in common."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._convert = tokenizer.convert_ids_to_tokens
        self._special = frozenset(
            i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        kinds = _decoders_of(tokenizer)
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._texts = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._ids: dict[frozenset[str], dict[int, str]] = {}
        self._letters: dict[int, bytes] = {}

    def ids_of(self, tokens: frozenset[str]) -> dict[int, str]:
        """The tokens that are special here, by id."""
        if tokens not in self._ids:
            self._ids[tokens] = {
                i: self._texts[i] for i in self._special if self._texts[i] in tokens
            }
        return self._ids[tokens]

    def letters(self, token: int) -> bytes:
        """What a token adds to a text of a byte-level tokenizer: nothing, if it is special."""
        found = self._letters.get(token)
        if found is None:
            found = self._letters[token] = self._made_letters(token)
        return found

    def _made_letters(self, token: int) -> bytes:
        written = self.written(token)
        data = _bytes_of(written)
        if written and token in self._texts and not _is_utf8(data):
            return written.encode()
        return data

    def bytes_of(self, token: int) -> bytes:
        """What one token alone stands for; may be a part of a character."""
        if token in self._special:
            return self._texts[token].encode()
        if self.byte_level:
            return self.letters(token)
        written = self.written(token)
        if self.byte_fallback and (match := _BYTE.fullmatch(written)):
            return bytes.fromhex(match[1])
        return written.replace(_SENTENCEPIECE_SPACE, " ").encode()

    def written(self, token: int) -> str:
        """The token as it stands in the vocabulary; "" for one that has no text."""
        if token in self._special:
            return ""
        try:
            return self._convert(token) or ""
        except (IndexError, OverflowError):  # of a tokenizer in Python, for ids that it has not
            return ""


_FACTS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, _Facts]] = WeakKeyDictionary()


def _facts_of(tokenizer: PreTrainedTokenizerBase) -> _Facts:
    """Made once for each tokenizer, and again if it has got more tokens."""
    size, facts = _FACTS.get(tokenizer, (-1, None))
    if facts is None or size != len(tokenizer):
        facts = _Facts(tokenizer)
        _FACTS[tokenizer] = len(tokenizer), facts
    return facts


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes that one token adds to a text; of a special token its name."""
    return _facts_of(tokenizer).bytes_of(token)


def _decoders_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Names of the decoders of a tokenizer that the package `tokenizers` runs."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _bytes_of(written: str) -> bytes:
    """The bytes of a byte-level token; one with other letters stands for itself."""
    try:
        return bytes(_LETTERS[letter] for letter in written)
    except KeyError:
        return written.encode()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
