"""The messages of a conversation, as OpenAI's chat API has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ..fields import Strict, Text, ToolName


class Instruction(Strict):
    """What the model is to be and do."""

    role: Literal["system", "developer"]
    content: Text
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content}


class User(Strict):
    role: Literal["user"]
    content: Text
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        return {"role": "user", "content": self.content}


class CalledFunction(Strict):
    name: str
    arguments: str = "{}"


class Call(Strict):
    """A call that the model has made."""

    ignored = frozenset({"index"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """With its arguments as a mapping; a text that is no JSON object stays."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Assistant(Strict):
    """An answer of the model, as a client gives it back."""

    ignored = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning_details"})
    role: Literal["assistant"]
    content: Text | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        calls = [call.plain() for call in self.tool_calls or ()]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.content is None and not calls:
            message["content"] = ""
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
            message["thinking"] = thought  # the name in gpt-oss' template
        if calls:
            message["tool_calls"] = calls
        return message


class ToolResult(Strict):
    role: Literal["tool"]
    content: Text
    tool_call_id: str | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        message = {"role": "tool", "content": self.content}
        message |= {"tool_call_id": self.tool_call_id} if self.tool_call_id else {}
        return message | ({"name": self.name} if self.name else {})


Message = Annotated[Instruction | User | Assistant | ToolResult, Field(discriminator="role")]


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise ValueError("a function's parameters are a schema of type object")
        return parameters


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class ChosenFunction(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates take them; the result of a tool gets the name of its call."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        one = message.plain()
        for call in one.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if one["role"] == "tool" and "name" not in one and one.get("tool_call_id") in names:
            one["name"] = names[one["tool_call_id"]]
        found.append(one)
    return found
