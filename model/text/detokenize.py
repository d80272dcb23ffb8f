"""Token ids to text, piece by piece and in whole characters."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental detokenization: push token ids, get the text that they complete.

    A byte-level token may end inside a character, and some tokenizers write a token differently at
    the start of a text. So each piece is the difference of two decodings that begin with the same
    ids, and is held back while it ends in an incomplete character. The pieces joined are the
    decoding of all ids together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # first of the ids that are decoded again, as context
        self.done = 0  # ids whose text has been returned

    def push(self, token: int) -> str:
        """The text that `token` adds, or "" while a character is incomplete."""
        self.ids.append(token)
        text = self._decode(self.start, len(self.ids))
        before = self._decode(self.start, self.done)
        if not text.startswith(before) or len(text) <= len(before):
            return ""
        # A real U+FFFD is held back too: only the next token shows whether it is incomplete.
        if text.endswith(_REPLACEMENT):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text[len(before) :]

    def finish(self) -> str:
        """The rest of the text at the end; an incomplete character becomes U+FFFD."""
        text = self._decode(self.start, len(self.ids))
        before = self._decode(self.start, self.done)
        self.start = self.done = len(self.ids)
        return text[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(
            self.ids[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
