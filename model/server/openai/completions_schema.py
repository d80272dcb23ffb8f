"""The body of a request to `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..serving.fields import Count, Sampling, TopLogprobs
from .chat_schema import StreamOptions

IGNORED = frozenset({"metadata", "store", "user"})
"""Fields that clients send and that change nothing here."""


def _listed(prompt: Any) -> Any:
    """One prompt as a list of one: a text, or token ids."""
    if isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    ):
        return [prompt]
    return prompt


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str | list[Count]],
    Field(min_length=1, max_length=4096),
    BeforeValidator(_listed),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(Sampling):
    ignored = IGNORED
    model: str | None = None
    prompt: Prompts
    max_tokens: Count | None = 16
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of: only n outputs are made, all of which are returned")
        if self.suffix:
            raise ValueError("suffix: this model writes on from a prompt only")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options are for stream")
        return self
