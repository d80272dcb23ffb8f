"""Prompts: token ids of a text, the text of a conversation, the check against the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pykernels.errors import PykernelsError

NOT_UTF8 = "Give it as UTF-8; iconv converts a file"
"""The hint for a prompt in another encoding."""


def encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt that is to be continued, with the tokens that the tokenizer puts in
    front of a text (bos).

    A prompt that already starts with the text of bos gets no second one. What the tokenizer puts
    behind a text (``</s>`` of some) is left out: transformers and vLLM keep it, but behind it a
    model begins another text. An empty prompt is bos alone. For a conversation see `encode_chat`.

    Raises:
        PykernelsError: an empty prompt of a model without bos, or one that is no UTF-8 text.
    """
    ids = encode_bare(tokenizer, prompt)
    bos = tokenizer.bos_token
    if not (bos and prompt.startswith(bos)):
        ids = _with_front(ids, tokenizer(prompt)["input_ids"])
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


def encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text alone: the tokenizer adds none. None for an empty one.

    Raises:
        PykernelsError: it is no UTF-8 text.
    """
    # Python passes bytes of an argument or of stdin that are no UTF-8 as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PykernelsError("The prompt holds bytes that are no UTF-8 text", NOT_UTF8)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _with_front(ids: list[int], whole: list[int]) -> list[int]:
    """A text's ids with what stands in front of them in `whole`, without what stands behind."""
    for front in range(len(whole) - len(ids) + 1):
        if whole[front : front + len(ids)] == ids:
            return whole[: front + len(ids)]
    return whole


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text that asks for the assistant's next answer.

    `messages`: `{"role": "system" | "user" | "assistant", "content": ...}`, oldest first. Written
    by the tokenizer's chat template; by a plain transcript if it has none. `variables`: of the
    template, tools for one, or arguments of transformers' `apply_chat_template`.

    Raises:
        PykernelsError: the template refuses the conversation, or fails.
    """
    given: dict[str, Any] = {"add_generation_prompt": True, **(variables or {}), "tokenize": False}
    if tokenizer.chat_template:
        try:
            return str(tokenizer.apply_chat_template(list(messages), **given))
        except TemplateError as error:  # some refuse a system message, for one
            raise PykernelsError(
                f"The model's chat template refuses this conversation: {_line(error)}",
                "Leave out what it does not know, --system for one",
            ) from None
        except Exception as error:  # a template is a program, which can fail in any way
            raise PykernelsError(
                "The model's chat template fails on this conversation:"
                f" {type(error).__name__}: {_line(error)}",
                "Correct the template, which is with the tokenizer, or leave it out",
            ) from error
    lines = [
        f"{message['role'].capitalize()}: {message.get('content') or ''}\n" for message in messages
    ]
    if given.get("continue_final_message"):
        return "".join(lines).rstrip("\n")
    return "".join(lines) + ("Assistant:" if given["add_generation_prompt"] else "")


def encode_chat(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """Token ids of `chat_prompt`: those of transformers' `apply_chat_template(tokenize=True)`.

    Raises:
        PykernelsError: as `chat_prompt` and `encode`.
    """
    return encode_written(model, tokenizer, chat_prompt(tokenizer, messages))


def encode_written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> list[int]:
    """Token ids of what `chat_prompt` wrote.

    A template writes all special tokens itself, so the tokenizer adds none. A plain transcript, of
    a tokenizer without a template, is a prompt as any other.

    Raises:
        PykernelsError: as `encode`.
    """
    if tokenizer.chat_template:
        ids = encode_bare(tokenizer, text)
        if ids:
            return ids
    return encode(model, tokenizer, text)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


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
