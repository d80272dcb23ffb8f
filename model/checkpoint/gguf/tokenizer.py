"""A GGUF file's tokenizer as one of transformers', from the vocabulary in its metadata."""

from __future__ import annotations

import itertools
import warnings
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

from ...text.merges import merges_of
from .files import GGUF
from .pretokenizers import BOS_FIRST, SPLITS, WHOLE_WORDS_FIRST
from .vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary


def has_tokenizer(checkpoint: GGUF) -> bool:
    """Whether there is a vocabulary; files made for benchmarks have none."""
    return checkpoint.metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"


def tokenizer_of(checkpoint: GGUF) -> PreTrainedTokenizerBase:
    """The tokenizer, with its special tokens and chat template.

    A special token outside the vocabulary, and a pre-tokenizer that is not named, are warnings, as
    in llama.cpp.

    Raises:
        PykernelsError: a kind of tokenizer that is not known, or a vocabulary that is wrong.
    """
    vocabulary = Vocabulary(checkpoint)
    kind, pre = vocabulary.model, vocabulary.word("pre") or "default"
    if kind not in _KINDS:
        raise PykernelsError(
            f"{checkpoint.path} has the tokenizer {kind!r}, which is not known",
            f"Use a file with one of {', '.join(_KINDS)}",
        )
    if kind == "gpt2" and not vocabulary.word("pre"):
        vocabulary.notes.append(
            f"{checkpoint.path} does not name its pre-tokenizer; texts are split by llama.cpp's"
            " default, which may be another than the model was trained with"
        )
    try:
        tokenizer = _KINDS[kind](vocabulary, pre)
        _add_special(vocabulary, tokenizer)
        names = {name: _token(vocabulary, key) for name, key in _SPECIAL.items()}
        if (bos := _first_token(checkpoint, vocabulary, kind, pre)) is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos}:0 $A:0",
                pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
                special_tokens=[(bos, vocabulary.ids[bos])],
            )
        template = checkpoint.metadata.get("tokenizer.chat_template")
        made = PreTrainedTokenizerFast(
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
    for note in vocabulary.notes:
        warnings.warn(note, stacklevel=2)
    return made


def special_ids(checkpoint: GGUF) -> dict[str, Any]:
    """The configuration's ``bos_token_id``, ``pad_token_id`` and ``eos_token_id``."""
    if not has_tokenizer(checkpoint):
        return {"bos_token_id": None, "pad_token_id": None, "eos_token_id": None}
    vocabulary = Vocabulary(checkpoint)
    return {
        "bos_token_id": vocabulary.id("bos_token_id"),
        "pad_token_id": vocabulary.id("padding_token_id"),
        "eos_token_id": vocabulary.ends or None,
    }


_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _token(vocabulary: Vocabulary, key: str) -> str | None:
    token = vocabulary.id(key)
    return None if token is None else vocabulary.tokens[token]


def _first_token(checkpoint: GGUF, vocabulary: Vocabulary, kind: str, pre: str) -> str | None:
    """The token that every text begins with; None: there is none."""
    wanted = vocabulary.flag("add_bos_token")
    bos = _token(vocabulary, "bos_token_id")
    if wanted and bos is None:
        raise PykernelsError(
            f"{checkpoint.path} wants a bos token in front of texts (tokenizer.ggml.add_bos_token),"
            " and names none (bos_token_id)",
            "Convert the model again",
        )
    if kind == "gemma4":  # llama.cpp's converter says False, its loader does not believe it
        return bos
    if wanted is None:
        wanted = kind == "llama" or pre in BOS_FIRST
    return bos if wanted else None


def _add_special(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Tokens that are matched in a text before it is split."""
    kinds = {CONTROL: True, USER_DEFINED: False}
    added = [
        AddedToken(token, normalized=False, special=kinds[kind])
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in kinds
    ]
    # In runs of one kind: `add_tokens` makes none of them special.
    for special, run in itertools.groupby(added, lambda token: bool(token.special)):
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add(list(run))


def _byte_level(vocabulary: Vocabulary, pre: str) -> Tokenizer:
    """Byte-pair merges of bytes written as letters (GPT-2's)."""
    if pre not in SPLITS:
        raise PykernelsError(
            f"the vocabulary was made with the pre-tokenizer {pre!r}, which is not known",
            f"Use a file with one of {', '.join(SPLITS)}",
        )
    whole_words = pre in WHOLE_WORDS_FIRST
    merges = [_halves(merge) for merge in vocabulary.values("merges", str)]
    if not merges and pre == "kimi-k2":
        # Made of a tiktoken file: a token's id is its rank, from which the merges follow.
        kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
        ordinary = {token: i for i, (token, kind) in enumerate(kinds) if kind == NORMAL}
        merges, whole_words = merges_of(ordinary, float), True
    if not merges:
        raise vocabulary.missing("merges")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=whole_words)
    )
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _halves(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise PykernelsError(
            f"the vocabulary has the merge {merge!r}, which joins nothing", "Convert it again"
        )
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(vocabulary: Vocabulary, pre: str) -> Tokenizer:
    """SentencePiece's byte-pair merges: two pieces merge if their join is one, the likeliest
    first; what is no piece becomes bytes."""
    scores = vocabulary.scores
    if not scores:
        raise vocabulary.missing("scores")
    kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
    unknown = next((token for token, kind in kinds if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges_of(vocabulary.ids, lambda i: -scores[i]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    prefix = vocabulary.flag("add_space_prefix") is not False
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefix else spaces
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


def _gemma4(vocabulary: Vocabulary, pre: str) -> Tokenizer:
    """Byte-pair merges of whole texts, whose spaces are ``▁``; what is no token becomes bytes."""
    merges = [_halves(merge) for merge in vocabulary.values("merges", str)]
    if not merges:
        raise vocabulary.missing("merges")
    unknown = vocabulary.id("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
"""Tokenizers by ``tokenizer.ggml.model``."""
