"""Log-probabilities of tokens as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from runtime.engine import TokenLogprob

from ...text.detokenize import token_bytes


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase, logprobs: Iterable[TokenLogprob]
) -> dict[str, Any]:
    """A chat message's logprobs: each token with its bytes, and those beside it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """A completion's logprobs: four lists that grow with the text.

    Args:
        start: characters of the text before the first token; below 0: as many are not in it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, start: int = 0) -> None:
        self._tokenizer, self._offset = tokenizer, start

    def lists(self, logprobs: Iterable[TokenLogprob], top: int) -> dict[str, Any]:
        """The lists of the next tokens; ``top``: how many others are wanted beside each."""
        found = self.empty()
        for one in logprobs:
            others = {self.token(token): finite(logprob) for token, logprob in one.top[:top]}
            others.setdefault(self.token(one.token), finite(one.logprob))
            self._add(found, one.token, finite(one.logprob), others if top else None)
        return found

    def first(self, token: int) -> dict[str, Any]:
        """The lists of a prompt's first token, which has no logprob."""
        lists = self.empty()
        self._add(lists, token, None, None)
        return lists

    def token(self, token: int) -> str:
        """The text of one token; one that is a part of a character is shown as its bytes."""
        raw = token_bytes(self._tokenizer, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @staticmethod
    def empty() -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(
        self,
        lists: dict[str, Any],
        token: int,
        logprob: float | None,
        others: dict[str, float] | None,
    ) -> None:
        text = self.token(token)
        lists["tokens"].append(text)
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(others)
        lists["text_offset"].append(max(0, self._offset))
        self._offset += len(text)


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, -9999.0)
