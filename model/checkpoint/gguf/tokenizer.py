"""A GGUF file's tokenizer as one of transformers', from the vocabulary in its metadata."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pykernels.errors import PykernelsError

from .files import GGUF
from .pretokenizers import BOS_FIRST, SPLITS, WHOLE_WORDS_FIRST

_UNKNOWN, _CONTROL, _OWN, _BYTE = 2, 3, 4, 6
"""``token_type``: the unknown token, ones with a meaning, ones that are matched as they are, bytes;
1 is an ordinary one, 5 one that is not used."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<EOT>",
    "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|im_user|>",
)  # fmt: skip
"""Control tokens that end an answer though the metadata names one only (as llama.cpp has it)."""


def has_tokenizer(checkpoint: GGUF) -> bool:
    """Whether there is a vocabulary; files made for benchmarks have none."""
    return checkpoint.metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"


def tokenizer_of(checkpoint: GGUF) -> PreTrainedTokenizerBase:
    """The tokenizer, with its special tokens and chat template.

    Raises `PykernelsError` for one that is not known, and for a vocabulary that is wrong.
    """
    vocabulary = _Vocabulary(checkpoint.metadata, checkpoint.path)
    kind, pre = vocabulary.word("model"), vocabulary.word("pre", "default")
    if kind not in _KINDS:
        raise PykernelsError(
            f"{checkpoint.path} has the tokenizer {kind!r}, which is not known",
            f"Use a file with one of {', '.join(_KINDS)}",
        )
    bos_by_default = kind == "llama" or pre in BOS_FIRST
    try:
        tokenizer = _KINDS[kind](vocabulary, pre)
        vocabulary.add_special(tokenizer)
        names = {name: vocabulary.special(key) for name, key in _SPECIAL.items()}
        bos = names["bos_token"]
        if bos is not None and vocabulary.flag("add_bos_token", bos_by_default):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos}:0 $A:0",
                pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
                special_tokens=[(bos, vocabulary.tokens.index(bos))],
            )
        template = checkpoint.metadata.get("tokenizer.chat_template")
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=template if isinstance(template, str) else None,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in names.items() if token is not None},
        )
    except PykernelsError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a vocabulary that is wrong
        raise PykernelsError(
            f"The tokenizer of {checkpoint.path} cannot be made: {error}", "Download it again"
        ) from error


def special_ids(checkpoint: GGUF) -> dict[str, Any]:
    """The configuration's ``bos_token_id``, ``pad_token_id`` and ``eos_token_id``."""
    if not has_tokenizer(checkpoint):
        return {"bos_token_id": None, "pad_token_id": None, "eos_token_id": None}
    vocabulary = _Vocabulary(checkpoint.metadata, checkpoint.path)
    return {
        "bos_token_id": vocabulary.id("bos_token_id"),
        "pad_token_id": vocabulary.id("padding_token_id"),
        "eos_token_id": ends_of(checkpoint) or None,
    }


def ends_of(checkpoint: GGUF) -> list[int]:
    """Token ids that end an answer."""
    vocabulary = _Vocabulary(checkpoint.metadata, checkpoint.path)
    named = [vocabulary.id(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    found = {token for token in named if token is not None}
    texts = [token for token in _ENDS if token in vocabulary.controls]
    if {"<|return|>", "<|call|>", "<|end|>"} <= set(texts):  # gpt-oss: a message's end, no answer's
        texts.remove("<|end|>")
        found.discard(vocabulary.controls["<|end|>"])
    return sorted(found | {vocabulary.controls[token] for token in texts})


_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _Vocabulary:
    """The metadata under ``tokenizer.ggml``."""

    def __init__(self, metadata: dict[str, Any], path: Path) -> None:
        self._metadata, self._path = metadata, path
        self.tokens: list[str] = self.list("tokens", str)
        self.types: list[int] = self.list("token_type", int) or [1] * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise self.wrong("tokens")
        self.controls = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == _CONTROL
        }

    def list(self, key: str, kind: type) -> list[Any]:
        """A list of the metadata, empty if there is none."""
        found = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(found, list) or not all(type(one) is kind for one in found):
            raise self.wrong(key)
        return found

    def word(self, key: str, default: str = "") -> str:
        found = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, str):
            raise self.wrong(key)
        return found

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def id(self, key: str) -> int | None:
        """A token's id, None if the metadata has none."""
        found = self._metadata.get(f"tokenizer.ggml.{key}")
        if found is not None and not (type(found) is int and 0 <= found < len(self.tokens)):
            raise self.wrong(key)
        return found

    def special(self, key: str) -> str | None:
        token = self.id(key)
        return None if token is None else self.tokens[token]

    def add_special(self, tokenizer: Tokenizer) -> None:
        """Tokens that are matched in a text before it is split."""
        kinds = {_CONTROL: True, _OWN: False}
        added = [
            AddedToken(token, normalized=False, special=kinds[kind])
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds and token
        ]
        # In runs of one kind: `add_tokens` makes none of them special.
        for special, run in itertools.groupby(added, lambda token: bool(token.special)):
            add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
            add(list(run))

    def wrong(self, key: str) -> PykernelsError:
        return PykernelsError(
            f"{self._path} has tokenizer.ggml.{key} that cannot be read", "Convert the model again"
        )


def _byte_level(vocabulary: _Vocabulary, pre: str) -> Tokenizer:
    """Byte-pair merges of bytes written as letters (GPT-2's)."""
    if pre not in SPLITS:
        raise PykernelsError(
            f"the vocabulary was made with the pre-tokenizer {pre!r}, which is not known",
            f"Use a file with one of {', '.join(SPLITS)}",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.list("merges", str)]
    ids = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens)))}
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    )
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary, pre: str) -> Tokenizer:
    """SentencePiece's byte-pair merges: two pieces merge if their join is one, the likeliest
    first; what is no piece becomes bytes."""
    tokens = vocabulary.tokens
    scores = vocabulary.list("scores", float)
    if len(scores) != len(tokens):
        raise vocabulary.wrong("scores")
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    pairs = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((-scores[i], ids[left], ids[right], left, right))
    pairs.sort()
    kinds = zip(tokens, vocabulary.types, strict=True)
    unknown = next((token for token, kind in kinds if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids, merges=[(left, right) for *_, left, right in pairs], unk_token=unknown,
            fuse_unk=True, byte_fallback=_BYTE in vocabulary.types,
        )
    )  # fmt: skip
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefix else spaces
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By ``tokenizer.ggml.model``."""
