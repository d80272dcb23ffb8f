"""Prompts: token ids of a text, the text of a conversation, the check against the context."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pykernels.errors import PykernelsError

NOT_UTF8 = "Give it as UTF-8; iconv converts a file"
"""The hint for a prompt in another encoding."""


def encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt, with the bos token in front if the tokenizer adds one.

    A prompt that already starts with the text of bos (a chat template writes it) gets no second
    one. An empty prompt is bos alone. Raises `PykernelsError` if the model has none, or for a
    prompt that is no UTF-8 text.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        # Python passes bytes of an argument or of stdin that are no UTF-8 as lone surrogates.
        raise PykernelsError("The prompt holds bytes that are no UTF-8 text", NOT_UTF8)
    bos = tokenizer.bos_token
    add_bos = not (bos and prompt.startswith(bos))
    ids: list[int] = tokenizer(prompt, add_special_tokens=add_bos)["input_ids"]
    if ids:
        return ids
    first = tokenizer.bos_token_id
    if first is None:
        first = model.config.bos_token_id
    if first is None:
        raise PykernelsError(
            "The prompt is empty and the model has no token to begin with", "Give some text"
        )
    return [first]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
    """The text that asks for the assistant's next answer.

    `messages`: `{"role": "system" | "user" | "assistant", "content": ...}`, oldest first. Written
    by the tokenizer's chat template; by a plain transcript if it has none. Raises `PykernelsError`
    for a conversation that the template refuses.
    """
    if tokenizer.chat_template:
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:  # some refuse a system message, for one
            raise PykernelsError(
                f"The model's chat template refuses this conversation: {error}",
                "Leave out what it does not know, --system for one",
            ) from None
    lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
    return "".join(lines) + "Assistant:"


def check_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise `PykernelsError` if a prompt and its continuation do not fit the model's context."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None or prompt_tokens + max_new_tokens <= context:
        return
    if prompt_tokens >= context:
        raise PykernelsError(
            f"The prompt has {prompt_tokens} tokens, the model's context is {context}",
            "Shorten the prompt",
        )
    raise PykernelsError(
        f"The prompt's {prompt_tokens} tokens and {max_new_tokens} new ones do not fit the model's "
        f"context of {context}",
        f"Ask for at most {context - prompt_tokens} new tokens or shorten the prompt",
    )
