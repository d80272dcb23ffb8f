"""A `tiktoken.model` file as one of transformers' tokenizers: Moonshot's Kimi and Moonlight.

Such a file holds ranks: a line for each token, its bytes in base64 and its id. The merges follow
from the ranks; the regular expression that splits texts first stands in Moonshot's code only
(`tokenization_kimi.py`), the special tokens in `tokenizer_config.json`. Neither the package
tiktoken nor code of the checkpoint is needed.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pykernels.errors import PykernelsError

from ..text.merges import merges_of
from .gguf.pretokenizers import SPLITS
from .tensors.safetensors import read_json

FILE = "tiktoken.model"
_CLASS = "TikTokenTokenizer"
"""Moonshot's name in `tokenizer_config.json`."""
_RESERVED = 256
"""Ids behind the ranks that are special tokens, named or not."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_tiktoken(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint's folder, with its special tokens and chat template.

    Raises:
        PykernelsError: a file that cannot be read, or another tokenizer than Moonshot's: what it
            splits texts by is unknown.
    """
    config_file = folder / "tokenizer_config.json"
    if not config_file.is_file():
        raise PykernelsError(
            f"{folder} has a {FILE}, but no tokenizer_config.json with its special tokens",
            "Download that file too",
        )
    config = read_json(config_file)
    if config.get("tokenizer_class") != _CLASS:
        raise PykernelsError(
            f"{folder} has a {FILE} of the class {config.get('tokenizer_class')!r}, whose way of"
            " splitting texts is not known",
            "Convert it to a tokenizer.json with transformers, and put that into the folder",
        )
    ranks = _read_ranks(folder / FILE)
    letters = bytes_to_unicode()
    ids = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    # A split that is a token stays whole, whatever the merges say.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges_of(ids, float), ignore_merges=True))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS["kimi-k2"]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = _special_tokens(config_file, config, len(ids))
    tokenizer.add_tokens(added)  # in the order of their ids
    tokenizer.add_special_tokens([token for token in added if token.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(folder, config),
        clean_up_tokenization_spaces=False,
        **{name: text for name in _NAMED if (text := _content(config.get(name))) is not None},
    )


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Ids 0 to N - 1 by the bytes of their tokens."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise PykernelsError(f"{file} cannot be read: {error}", "Download it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise PykernelsError(
            f"the ids of {file} are not those from 0 to one below the number of its tokens",
            "Download it again",
        )
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise PykernelsError(f"{file} has no token for the byte {absent[0]}", "Download it again")
    return ranks


def _special_tokens(file: Path, config: dict[str, Any], first: int) -> list[AddedToken]:
    """Tokens `first` and up; one that the configuration does not name has Moonshot's name."""
    named = config.get("added_tokens_decoder") or {}
    try:
        tokens = {
            int(i): (str(token["content"]), bool(token.get("special", False)))
            for i, token in named.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PykernelsError(
            f"{file} has added_tokens_decoder that cannot be read", "Download it again"
        ) from error
    if tokens and min(tokens) < first:
        raise PykernelsError(
            f"{file} names the special token {min(tokens)}, which is one of the {first} of {FILE}",
            "Download both files again",
        )
    last = max([first + _RESERVED - 1, *tokens])
    return [
        AddedToken(text, normalized=False, special=special)
        for text, special in (
            tokens.get(i, (f"<|reserved_token_{i}|>", False)) for i in range(first, last + 1)
        )
    ]


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # of several, by name
        return {each["name"]: each["template"] for each in template}
    return template


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
