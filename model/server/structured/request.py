"""What a request asks of the output's form, as a constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from pykernels.errors import PykernelsError

from ..parsers.harmony import Harmony
from ..parsers.marked import MarkedFormat
from ..parsers.parser import FormatParser
from .calls import calls, signatures
from .constraint import GrammarConstraint
from .lark import Lark
from .vocabulary import Vocabulary


def constraint_for(
    vocabulary: Vocabulary,
    parser: FormatParser,
    *,
    response_format: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] = "auto",
    parallel_tool_calls: bool = True,
    prompt_tail: str = "",
) -> GrammarConstraint | None:
    """The constraint of a request's outputs; None where any text will do.

    Reasoning, where the model's template has it, stays free; the form holds for what follows.

    Args:
        response_format: OpenAI's: ``{"type": "text"}``, ``"json_object"``, ``"json_schema"``; and
            ``{"type": "regex", "regex": ...}``, ``{"type": "grammar", "grammar": ...}`` in
            llguidance's lark.
        tools: OpenAI's; of any kind but functions the caller has made functions.
        tool_choice: "none", "auto", "required", or ``{"type": "function", "function": {"name"}}``;
            also with the name beside the type, and "any" for "required", as other APIs have it.
            With "auto" only ``response_format`` constrains: the output is a call or has that form.
        parallel_tool_calls: one call may follow the other, unless the choice names its function.
        prompt_tail: the end of the rendered prompt, as ``Parser.stream`` is given it.

    Raises:
        PykernelsError: a form that is unknown, wrong or cannot be enforced; a tool that is not
            there.
    """
    form = parser.form
    lark = Lark(vocabulary, form.special_tokens)
    choice = _choice(tool_choice)
    forced = choice not in ("none", "auto")
    bodies = []
    if response_format is not None and not forced:
        bodies += _body(lark, response_format)
        if not bodies:
            return None
    if forced or (bodies and tools and choice == "auto"):
        functions = _chosen(signatures(tools), choice)
        many = parallel_tool_calls and not isinstance(choice, Mapping)
        bodies.append(calls(form, lark, functions, many))
    if not bodies:
        return None
    called = [False] * len(bodies)
    called[-1] = forced or len(bodies) > 1
    if isinstance(form, Harmony):
        start = _harmony(lark, prompt_tail, bodies, called)
    else:
        assert isinstance(form, MarkedFormat)
        before = _reasoning(lark, form, prompt_tail) if parser.reasons else ""
        start = f"{before} {lark.any_of(bodies)}"
    return GrammarConstraint(vocabulary, lark.grammar(start))


def _choice(choice: Any) -> Any:
    """A word, or a mapping with the name of a function."""
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        if "name" in function:
            return function
        choice = choice.get("type")
    return "required" if choice == "any" else choice


def _chosen(functions: dict[str, Mapping[str, Any]], choice: Any) -> dict[str, Mapping[str, Any]]:
    if not functions:
        raise PykernelsError("tool_choice demands a call, and there are no tools", "Give tools")
    if choice in ("auto", "required"):
        return functions
    name = choice["name"] if isinstance(choice, Mapping) else choice
    if not isinstance(choice, Mapping) or name not in functions:
        raise PykernelsError(
            f"tool_choice: {name!r} is none of the tools",
            f"Name one of {', '.join(functions)}, or use none, auto or required",
        )
    return {name: functions[name]}


def _body(lark: Lark, wanted: Mapping[str, Any]) -> list[str]:
    """An expression for the form of the answer; none if it is plain text."""
    kind = wanted.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [lark.json({"type": "object"}, one_line=False)]
    if kind == "json_schema":
        given = wanted.get("json_schema", wanted)
        schema, strict = given.get("schema"), bool(given.get("strict"))
        if not isinstance(schema, Mapping):
            raise PykernelsError("response_format has no schema", "Give json_schema.schema")
        return [lark.json(schema, one_line=False, strict=strict)]
    if kind == "regex" and isinstance(wanted.get("regex"), str):
        return [f"/{llguidance.regex_to_lark(wanted['regex'], 'd')}/"]
    if kind == "grammar" and isinstance(wanted.get("grammar"), str):
        return [lark.rule(f"%lark {{\n{wanted['grammar']}\n}}")]
    raise PykernelsError(
        f"response_format={dict(wanted)!r} is not known",
        "Use text, json_object, json_schema, or regex or grammar with a text of that name",
    )


_SPACE = r"/[ \n]{0,4}/"


def _reasoning(lark: Lark, form: MarkedFormat, prompt_tail: str) -> str:
    opening, closing = form.think
    tail = prompt_tail.rstrip()
    rest = f"{lark.until(closing)} {_SPACE}"
    if tail.endswith(opening):
        return rest
    if tail.endswith(closing):
        return _SPACE
    return f"({_SPACE} {lark.text(opening)} {rest})?"


def _harmony(lark: Lark, prompt_tail: str, bodies: list[str], called: list[bool]) -> str:
    header = prompt_tail[max(prompt_tail.rfind("<|start|>"), 0) :]
    if "<|message|>" in header:
        return lark.any_of(body for body, call in zip(bodies, called, strict=True) if not call)
    analysis = (
        f"{lark.text('<|channel|>analysis<|message|>')} {lark.until('<|end|>')}"
        f" {lark.text('<|start|>assistant')}"
    )
    final = lark.text("<|channel|>final<|message|>")
    whole = (body if call else f"{final} {body}" for body, call in zip(bodies, called, strict=True))
    return f"({analysis})* {lark.any_of(whole)}"
