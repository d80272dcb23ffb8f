"""Tools as the Responses API has them, and as chat templates have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ..openai.messages import only
from ..serving.fields import Strict, ToolName


class FunctionTool(Strict):
    ignored = frozenset({"defer_loading", "output_schema"})
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("function"), dict):
            raise ValueError("what is in function stands beside the type, in this API")
        return data


class CustomTool(Strict):
    """A tool whose input is a text; its grammar is shown to the model, not forced."""

    ignored = frozenset({"defer_loading"})
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Strict):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


class ServedTool(BaseModel):
    """A tool that OpenAI's own servers run. It is left out, with a note."""

    model_config = ConfigDict(extra="allow")
    type: str


_SERVED = ("web_search", "image_generation", "tool_search")


def _kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        return None
    return "served" if kind.startswith(_SERVED) else kind


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ServedTool, Tag("served")],
    Discriminator(_kind),
]


class ChosenTool(Strict):
    type: Literal["function", "custom"]
    name: str


class AllowedTool(BaseModel):
    """One of the client's, by its name; of others' servers there are none here."""

    type: str
    name: str | None = None


class AllowedChoice(Strict):
    """Some of the tools: the model is shown no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[ChosenTool | AllowedChoice, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class Named:
    """What a function's name, as the model knows it, stands for."""

    name: str
    namespace: str | None
    custom: bool


class Tools:
    """The tools of one request.

    Attributes:
        functions: as chat templates take them.
        left_out: types of those that a server of OpenAI's would run.
    """

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._named: dict[str, Named] = {}
        for tool in tools:
            if isinstance(tool, ServedTool):
                self.left_out.append(tool.type)
            elif isinstance(tool, NamespaceTool):
                for one in tool.tools:
                    self._add(one, tool.name)
            else:
                self._add(tool, None)

    def named(self, function: str) -> Named:
        """What a call's name stands for; the model may have made one up."""
        return self._named.get(function, Named(function, None, False))

    def chosen(self, choice: ToolChoice | None) -> tuple[list[dict[str, Any]], Any]:
        """The functions that the model is shown, and OpenAI's word for which it is to call.

        Raises:
            ApiError: one is allowed that is not there.
        """
        if choice == "none":
            return [], choice
        if isinstance(choice, AllowedChoice):
            flat = {named.name: function for function, named in self._named.items()}
            names = {flat.get(tool.name, tool.name) for tool in choice.tools if tool.name}
            return only(self.functions, names), choice.mode
        if isinstance(choice, ChosenTool):
            return self.functions, {"type": "function", "name": choice.name}
        return self.functions, choice

    def _add(self, tool: FunctionTool | CustomTool, namespace: str | None) -> None:
        name = flat_name(tool.name, namespace)
        custom = isinstance(tool, CustomTool)
        self._named[name] = Named(tool.name, namespace, custom)
        function: dict[str, Any] = {"name": name}
        if isinstance(tool, CustomTool):
            function["description"] = _described(tool)
            function["parameters"] = {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            }
        else:
            if tool.description is not None:
                function["description"] = tool.description
            function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
        self.functions.append({"type": "function", "function": function})


def flat_name(name: str, namespace: str | None) -> str:
    """A function's name for the model, which knows no namespaces."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_input(arguments: str) -> str:
    """The text that a call of a custom tool gives; the arguments as they are if they hold none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _described(tool: CustomTool) -> str:
    parts = [tool.description or ""]
    if tool.format is not None and isinstance(tool.format.get("definition"), str):
        syntax = tool.format.get("syntax", "grammar")
        parts.append(f"The input follows this {syntax} grammar:\n{tool.format['definition']}")
    return "\n\n".join(part for part in parts if part)
