"""The messages of a conversation, as OpenAI's chat API has them."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ..http.errors import bad_request
from ..serving.fields import Strict, Text, ToolName


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
        """The call with its arguments as a mapping; a text that is no JSON object stays."""
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
        # Never null: many templates search the text, or cut spaces off it, beside calls too.
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
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


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1)]


class AllowedChoice(Strict):
    """Some of the tools: the model is shown no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[ChosenTool | AllowedChoice, Field(discriminator="type")]
)


def chosen(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[list[dict[str, Any]], Any]:
    """Tools as chat templates take them, and which of them are to be called.

    Raises:
        ApiError: one is allowed that is not there.
    """
    functions = [tool.plain() for tool in tools]
    if choice == "none":
        return [], choice
    if isinstance(choice, AllowedChoice):
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        return only(functions, names), choice.allowed_tools.mode
    return functions, choice.model_dump() if isinstance(choice, ChosenTool) else choice


def only(functions: Sequence[dict[str, Any]], names: Set[str]) -> list[dict[str, Any]]:
    """The functions of these names.

    Raises:
        ApiError: there is none of a name.
    """
    if unknown := names - {function["function"]["name"] for function in functions}:
        raise bad_request(f"tool_choice: {min(unknown)!r} is none of the tools.", "tool_choice")
    return [function for function in functions if function["function"]["name"] in names]


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them; the result of a tool gets the name of its call."""
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
