"""A model's tokens as llguidance knows them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import llguidance
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pykernels.errors import PykernelsError

from .trial import Trial, refused


class Vocabulary:
    """Made once for a model: it takes about a second for a large tokenizer.

    Args:
        vocab_size: of the model's logits.
        eos_token_ids: tokens that end an output; what is complete ends with one of them.
        trusted: grammars have been tried already. Else each is compiled in another process first,
            as llguidance can end the one that it runs in.

    Raises:
        PykernelsError: a tokenizer in Python, whose tokens cannot be told from outside.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        trusted: bool = False,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise PykernelsError(
                f"a {type(tokenizer).__name__} cannot be used for structured output",
                "Put a tokenizer.json into the model's folder",
            )
        eos = sorted({token for token in eos_token_ids if 0 <= token < vocab_size})
        if not eos:
            raise PykernelsError(
                "structured output needs a token that ends the output, and this model has none",
                "Name it as eos_token_id in generation_config.json",
            )
        self.tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)
        self._added = {str(t): i for i, t in tokenizer.added_tokens_decoder.items()}
        special = {i: text for text, i in self._added.items() if self.special_token(text) == i}
        self._try = None if trusted else Trial(self.tokens.vocab_size, eos, special)

    def special_token(self, text: str) -> int | None:
        """The id of a marker that is a token of its own and never written as other tokens; None of
        one that is plain text in this vocabulary."""
        token = self._added.get(text)
        return token if token is not None and self.tokens.is_special_token(token) else None

    @lru_cache(maxsize=64)  # noqa: B019  (as long as the model lives)
    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the start of a grammar; to be copied.

        Args:
            grammar: in llguidance's lark.

        Raises:
            PykernelsError: the grammar is wrong, or takes too much to compile.
        """
        if self._try is not None:
            self._try(grammar)
        matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        if matcher.is_error():
            raise refused(matcher.get_error())
        return matcher
