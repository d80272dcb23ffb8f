"""The embedded model's tokenizer with the special tokens of a family."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import model
from model.server.structured import Vocabulary

EOS = 1


@cache
def vocabulary(markers: tuple[str, ...] = ()) -> tuple[PreTrainedTokenizerBase, Vocabulary]:
    """With ``markers`` as tokens of their own, and some ids that no token has.

    Without them grammars are tried in a process of their own first, as in a server.
    """
    tokenizer = AutoTokenizer.from_pretrained(model.EMBEDDED)
    tokenizer.add_tokens([AddedToken(m, normalized=False, special=True) for m in markers])
    return tokenizer, Vocabulary(tokenizer, 4224, [EOS], trusted=bool(markers))


def ids_of(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[int]:
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
