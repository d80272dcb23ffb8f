"""The body of a request to `/v1/messages`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..serving.fields import Body, Count, Stop, Strict

IGNORED = frozenset(
    {
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that clients send and that change nothing here."""

_CACHED = frozenset({"cache_control", "citations", "caller"})


def _blocks(content: Any) -> Any:
    """A text as one block of it."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(Strict):
    ignored = _CACHED
    type: Literal["text"]
    text: str


class PictureBlock(Strict):
    """What a model that reads text cannot use; a note takes its place."""

    ignored = _CACHED | {"title", "context"}
    type: Literal["image", "document"]
    source: dict[str, Any]


class ToolUse(Strict):
    ignored = _CACHED
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReference(Strict):
    ignored = _CACHED
    type: Literal["tool_reference"]
    tool_name: str


_SHOWN = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
ResultContent = Annotated[
    list[Annotated[TextBlock | PictureBlock | ToolReference, Field(discriminator="type")]],
    BeforeValidator(_blocks),
    WithJsonSchema(_SHOWN),
]


class ToolResult(Strict):
    ignored = _CACHED
    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = None


class Thinking(Strict):
    ignored = frozenset({"signature"})
    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Strict):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | PictureBlock | ToolUse | ToolResult | Thinking | RedactedThinking,
    Field(discriminator="type"),
]
Content = Annotated[list[Block], BeforeValidator(_blocks), WithJsonSchema(_SHOWN)]
System = Annotated[list[TextBlock], BeforeValidator(_blocks), WithJsonSchema(_SHOWN)]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(Strict):
    """A function of the client's."""

    ignored = frozenset(
        {
            "allowed_callers",
            "cache_control",
            "defer_loading",
            "eager_input_streaming",
            "input_examples",
            "strict",
        }
    )
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ServedTool(BaseModel):
    """A tool that Anthropic's own servers run. It is left out, with a note."""

    model_config = ConfigDict(extra="allow")
    type: str


_SERVED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "served" if isinstance(kind, str) and kind.startswith(_SERVED) else "function"


AnyTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[ServedTool, Tag("served")], Discriminator(_kind)
]


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is for the type tool, and that type needs it")
        return self

    def plain(self) -> str | dict[str, Any]:
        """The choice as OpenAI's API has it."""
        if self.name is None:
            return "required" if self.type == "any" else self.type
        return {"type": "function", "function": {"name": self.name}}


class ThinkingConfig(Strict):
    ignored = frozenset({"budget_tokens", "display"})
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    ignored = frozenset({"task_budget"})
    effort: str | None = None
    format: OutputFormat | None = None


def _no_thread(value: object) -> None:
    """Anthropic's clients send the whole conversation after this error, and no other."""
    if value is not None:
        raise PydanticCustomError(
            "thread_unsupported_request",
            "this server keeps no conversations; send the whole of it, without thread",
            {"details": {"error_code": "thread_unsupported_request", "unsupported": []}},
        )


class PromptRequest(Body):
    """What a prompt is made of: the body of `/v1/messages/count_tokens`."""

    ignored = IGNORED
    thread: Annotated[None, BeforeValidator(_no_thread)] = None
    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: System | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(PromptRequest):
    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of ``SamplingParams`` that are given."""
        given: dict[str, Any] = {"max_tokens": self.max_tokens}
        for name in ("temperature", "top_k", "top_p"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if stops := [stop for stop in self.stop_sequences or () if stop]:
            given["stop"] = stops
        return given
