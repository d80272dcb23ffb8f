"""Token ids to text, piece by piece, without ever showing half a character."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_HALF = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Feed token ids, get the text that has become certain.

    A byte-level token may end inside a character, and some tokenizers write a token differently at
    the start of a text. So each piece is the difference of two decodings that share their
    beginning, and waits while its end is an unfinished character. The pieces joined are the
    decoding of all ids together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # of the ids that are decoded again, as context
        self.shown = 0  # ids whose text was given out

    def push(self, token: int) -> str:
        """The text that `token` adds, or "" while a character is unfinished."""
        self.ids.append(token)
        text = self._decode(self.start, len(self.ids))
        before = self._decode(self.start, self.shown)
        if not text.startswith(before) or len(text) <= len(before):
            return ""
        # Also for a real U+FFFD: only with what follows is it certain that it is no half character.
        if text.endswith(_HALF):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return text[len(before) :]

    def finish(self) -> str:
        """What is left at the end, an unfinished character as U+FFFD."""
        text = self._decode(self.start, len(self.ids))
        before = self._decode(self.start, self.shown)
        self.start = self.shown = len(self.ids)
        return text[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(
            self.ids[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
