"""The body of a request to `/v1/responses`: the stateless part of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from ..serving.fields import Body, Count, Strict, TopLogprobs
from .tools import AnyTool, ToolChoice

IGNORED = frozenset(
    {
        "client_metadata",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Fields that clients send and that change nothing here."""

_STATE = frozenset({"status", "id", "phase", "internal_chat_message_metadata_passthrough"})


def _parts(content: Any) -> Any:
    """A text as one part of it."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class TextPart(Strict):
    ignored = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str


class PicturePart(Strict):
    """What a model that reads text cannot use; a note takes its place."""

    ignored = frozenset({"detail", "file_id", "file_data", "file_url", "filename", "image_url"})
    type: Literal["input_image", "input_file"]


Part = Annotated[TextPart | PicturePart, Field(discriminator="type")]
Content = Annotated[
    list[Part],
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class MessageItem(Strict):
    ignored = _STATE
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(Strict):
    ignored = _STATE
    type: Literal["reasoning"]
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(Strict):
    ignored = _STATE
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(Strict):
    ignored = _STATE
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(Strict):
    ignored = _STATE
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    name: str | None = None


def _kind(item: Any) -> str | None:
    """Messages may come without a type."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type", "message" if "role" in item else None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")],
    Discriminator(_kind),
]


def _items(given: Any) -> Any:
    """A text as a message of the user's."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class Reasoning(Strict):
    ignored = frozenset({"summary", "generate_summary", "context"})
    effort: str | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is for the type json_schema, and that type needs it")
        return self


class TextSettings(Strict):
    ignored = frozenset({"verbosity"})
    format: TextFormat | None = None


LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # is there unasked; the rest tells of tools that are left out
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(Body):
    ignored = IGNORED
    model: str | None = None
    input: Annotated[
        list[Item],
        Field(min_length=1),
        BeforeValidator(_items),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
        ),
    ]
    instructions: str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    include: list[Included] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_kept(cls, data: Any) -> Any:
        for name in ("previous_response_id", "conversation"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise ValueError(f"{name}: this server keeps no answers; send the whole input")
        return data

    @model_validator(mode="after")
    def _check_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs needs {LOGPROBS} in include")
        return self

    @property
    def logprobs(self) -> bool:
        """Whether the text's log-probabilities are asked for."""
        return LOGPROBS in (self.include or ())

    def sampling(self) -> dict[str, Any]:
        """The fields of ``SamplingParams`` that are given."""
        given = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        return {name: value for name, value in given.items() if value is not None}
