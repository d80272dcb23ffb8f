"""From what a request says to token ids: texts, conversations, tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from pykernels.errors import PykernelsError

from ...text.prompt import chat_prompt, encode, encode_bare, encode_written
from ..backend.interface import ServedModel
from ..http.errors import ApiError, bad_request

CONTEXT_CODE = "context_length_exceeded"
_MOST_PER_TOKEN = 32
"""Characters a token: a text with more of them than that is too long, whatever the tokens are."""
_TAIL = 256
"""Characters at the end of a prompt that tell a parser what the template has begun."""
_OURS = ("conversation", "chat_template", "tokenize", "return_dict", "return_tensors")
"""Arguments of ``apply_chat_template`` that are no variables of a template."""
_THINKING = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it.

    Attributes:
        ids: its tokens.
        tail: the end of its text, of a conversation.
        stop: strings that end the answer, for a model that does not end it itself.
    """

    ids: list[int]
    tail: str = ""
    stop: tuple[str, ...] = ()


class Prompts:
    """Makes the prompts of one model. Its methods take as long as the text is: not for an event
    loop."""

    def __init__(self, model: ServedModel) -> None:
        self.tokenizer, self.facts = model.tokenizer, model.facts
        self.template = template_text(self.tokenizer)

    def text(self, text: str) -> Prompt:
        """A text to be continued."""
        self._check_length(text)
        return Prompt(encode(self.facts, self._tokenizer(), text))

    def bare(self, text: str) -> Prompt:
        """A text alone, without what the tokenizer puts in front of it."""
        self._check_length(text)
        return Prompt(encode_bare(self._tokenizer(), text))

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Token ids to be continued.

        Raises:
            ApiError: none, or one that is outside the vocabulary.
        """
        vocab = self.facts.vocab_size
        if not ids or min(ids) < 0 or max(ids) >= vocab:
            raise bad_request(f"A prompt is a list of token ids below {vocab}.", "prompt")
        return Prompt(list(ids))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        prefilled: bool | None = None,
        begun: bool | None = None,
    ) -> Prompt:
        """A conversation, for the assistant's next message.

        Args:
            messages: as OpenAI's, content a text, a tool call's arguments a mapping.
            tools: as OpenAI's.
            variables: of the template.
            reasoning_effort: as OpenAI's; "none" turns reasoning off.
            prefilled: the last message is the beginning of the answer.
            begun: the template begins the answer; else its words may be anybody's.

        Raises:
            PykernelsError: there is no tokenizer.
            ApiError: the template refuses it; tools for a model that has none, a variable that is
                none.
        """
        given = dict(variables or {})
        for name in given:
            if name in _OURS:
                raise bad_request(
                    f"chat_template_kwargs: {name} is no variable of a template.",
                    "chat_template_kwargs",
                )
        if tools:
            if "tools" not in self.template:
                raise bad_request("This model's chat template knows no tools.", "tools")
            given["tools"] = list(tools)
        given = self._effort(reasoning_effort) | given
        turns = [self._role(message) for message in messages]
        if begun is not None:
            given["add_generation_prompt"] = begun
        if prefilled:
            given |= {"add_generation_prompt": False, "continue_final_message": True}
        ids, text = self._encode(turns, given)
        return Prompt(ids, text[-_TAIL:], () if self.template else ("\nUser:",))

    def _encode(
        self, messages: list[dict[str, Any]], given: Mapping[str, Any]
    ) -> tuple[list[int], str]:
        tokenizer = self._tokenizer()
        try:
            text = _rendered(tokenizer, messages, given)
        except ApiError:
            # Some templates join the arguments of a call to a text: they take them as JSON.
            if not any(message.get("tool_calls") for message in messages):
                raise
            text = _rendered(tokenizer, [_as_json(m) for m in messages], given)
        self._check_length(text)
        return encode_written(self.facts, tokenizer, text), text

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise PykernelsError("This model has no tokenizer", "Give token ids")
        return self.tokenizer

    def _check_length(self, text: str) -> None:
        """Raises ApiError for a text that need not be tokenized to know that it is too long."""
        most = self.facts.longest
        if len(text) > most * _MOST_PER_TOKEN:
            raise bad_request(
                f"The prompt has {len(text)} characters; with its answer {most} tokens fit.",
                "prompt",
                CONTEXT_CODE,
            )

    def _effort(self, effort: str | None) -> dict[str, Any]:
        if effort is None:
            return {}
        thinks = effort != "none"
        given: dict[str, Any] = {name: thinks for name in _THINKING if name in self.template}
        if thinks:
            given["reasoning_effort"] = effort
        return given

    def _role(self, message: Message) -> dict[str, Any]:
        if message["role"] == "developer" and "developer" not in self.template:
            return {**message, "role": "system"}
        return dict(message)


def template_text(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The chat template; where there are several, all of them."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    given: Mapping[str, Any],
) -> str:
    try:
        return chat_prompt(tokenizer, messages, given)
    except PykernelsError as error:  # its hint is for whoever has a command line
        raise bad_request(f"{error.cause}.", "messages") from error


def _as_json(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}
