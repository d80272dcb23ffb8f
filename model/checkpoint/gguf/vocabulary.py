"""The vocabulary in a GGUF file's metadata (``tokenizer.ggml``), checked as llama.cpp checks it.

Source: ``llama-vocab.cpp`` of llama.cpp, which decides what these keys mean.
"""

from __future__ import annotations

from typing import Any

from pykernels.errors import PykernelsError

from .files import GGUF

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""``token_type``: ordinary tokens, the unknown one, those with a meaning, those that are matched as
they are, single bytes; 5 is one that is not used."""

_AGAIN = "Convert the model again with a newer llama.cpp"

_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
"""Tokens that end an answer wherever a vocabulary has them, whatever their type."""

_FILL_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": (
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
    ),
    "fim_sep_token_id": ("<|file_sep|>",),
}
"""Tokens around files and gaps in code, which end an answer too: by key, else by text."""

_DEFAULTS = {"llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}}
"""Default ids by ``tokenizer.ggml.model``, where the metadata names none."""


class Vocabulary:
    """The tokens with their types, and what the metadata says about them.

    Attributes:
        model: the kind of tokenizer.
        tokens: by id, distinct; empty ones have a name of their own.
        types: of each token; those that end an answer are control tokens.
        ids: by token.
        ends: sorted ids of the tokens that end an answer.
        notes: what is wrong, but can be gone on with; a line each.

    Raises:
        PykernelsError: tokens, types or scores that are missing or too few, or a token twice.
    """

    def __init__(self, checkpoint: GGUF) -> None:
        self._metadata, self._path = checkpoint.metadata, checkpoint.path
        self.notes: list[str] = []
        self.model = self.word("model")
        self.tokens: list[str] = self.values("tokens", str)
        if not self.tokens:
            raise self.missing("tokens")
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.tokens)]
        self.ids = {token: i for i, token in reversed(list(enumerate(self.tokens)))}
        if len(self.ids) < len(self.tokens):
            i, token = next((i, t) for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise PykernelsError(
                f"{self._path} has the token {token!r} twice, as {self.ids[token]} and {i}", _AGAIN
            )
        self.types: list[int] = self._of_each("token_type", int) or [NORMAL] * len(self.tokens)
        self.scores: list[float] = self._of_each("scores", float, int)
        self.ends = self._find_ends()

    def values(self, key: str, *kinds: type) -> list[Any]:
        """A list of the metadata, empty if there is none."""
        values = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            raise self.wrong(key)
        return values

    def word(self, key: str, default: str = "") -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str):
            raise self.wrong(key)
        return value

    def flag(self, key: str) -> bool | None:
        """True or false; None if the metadata does not say."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return None if value is None else bool(value)

    def id(self, key: str) -> int | None:
        """A token's id. None if there is none, or one outside the vocabulary."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        default = _DEFAULTS.get(self.model, {}).get(key)
        if default is not None and default >= len(self.tokens):
            default = None
        if value is None:
            return default
        if type(value) is not int:
            raise self.wrong(key)
        if 0 <= value < len(self.tokens):
            return value
        note = (
            f"{self._path} has tokenizer.ggml.{key} {value}, outside its vocabulary of"
            f" {len(self.tokens)}: {'no token' if default is None else default} is used instead"
        )
        if note not in self.notes:
            self.notes.append(note)
        return default

    def missing(self, key: str) -> PykernelsError:
        return PykernelsError(f"{self._path} has no tokenizer.ggml.{key}", _AGAIN)

    def wrong(self, key: str) -> PykernelsError:
        return PykernelsError(
            f"{self._path} has tokenizer.ggml.{key} that cannot be read", "Convert the model again"
        )

    def _of_each(self, key: str, *kinds: type) -> list[Any]:
        """A list with a value for each token, empty if there is none; a longer one is cut."""
        values = self.values(key, *kinds)
        if values and len(values) < len(self.tokens):
            raise PykernelsError(
                f"{self._path} has {len(values)} values of tokenizer.ggml.{key} for"
                f" {len(self.tokens)} tokens",
                _AGAIN,
            )
        return values[: len(self.tokens)]

    def _find_ends(self) -> list[int]:
        named = [self.id(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        ends = {token for token in named if token is not None}
        by_text = {self.ids[text] for text in _ENDS if text in self.ids}
        for key, texts in _FILL_ENDS.items():
            if (token := self.id(key)) is not None:
                ends.add(token)
            else:
                by_text.update([self.ids[text] for text in texts if text in self.ids][:1])
        for token in by_text:
            self.types[token] = CONTROL
        ends |= by_text
        texts_of_ends = {self.tokens[token] for token in ends}
        if _ends_messages_only(texts_of_ends):
            ends.discard(self.ids["<|end|>"])
        if {"<|tool_response>", "</s>"} <= texts_of_ends:
            ends.discard(self.ids["</s>"])
            self.types[self.ids["</s>"]] = NORMAL
        return sorted(ends)


def _ends_messages_only(ends: set[str]) -> bool:
    """Whether ``<|end|>`` ends a message, of which an answer has several: gpt-oss, Solar."""
    calls = "<|call|>" in ends or "<|calls|>" in ends
    return "<|end|>" in ends and calls and ("<|return|>" in ends or "<|flush|>" in ends)
