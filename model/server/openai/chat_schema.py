"""The body of a request to `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..insight.experts import Extension
from ..serving.fields import Count, Sampling, Strict, TopLogprobs
from .messages import Message, Tool, ToolChoice

IGNORED = frozenset(
    {
        "metadata",
        "modalities",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that clients send and that change nothing here."""


class StreamOptions(Strict):
    """OpenAI's, and vLLM's: with ``continuous_usage_stats`` each chunk has the usage so far."""

    ignored = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage")
        return self


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's, and a regular expression or a grammar (llguidance's lark)."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        for name in ("json_schema", "regex", "grammar"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} is for the type {name}, and that type needs it")
        return self


def check_continued(begun: bool | None, continued: bool | None) -> None:
    """Raises ValueError for a message that is to be continued and begun."""
    if begun and continued:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")


class ChatRequest(Sampling):
    ignored = IGNORED
    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    pykernels: Extension | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options are for stream")
        check_continued(self.add_generation_prompt, self.continue_final_message)
        return self

    @property
    def most(self) -> int | None:
        """Most tokens of the answer."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens
