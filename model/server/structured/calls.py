"""Tool calls as each family writes them, as rules of a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

from pykernels.errors import PykernelsError

from ..parsers.gemma import Gemma
from ..parsers.harmony import Harmony
from ..parsers.json_call import Hermes, Mistral
from ..parsers.message import Format
from ..parsers.python_call import PythonCall
from ..parsers.tagged import Tagged
from ..parsers.values import types_of
from ..parsers.xml_call import XmlCall
from .gemma import notation
from .lark import Lark

Signatures = Mapping[str, Mapping[str, Any]]
"""Names of functions -> the schemas of their arguments."""


@singledispatch
def calls(form: Format, lark: Lark, functions: Signatures, many: bool) -> str:
    """An expression for calls of these functions.

    Args:
        form: the family's format.
        many: one or more calls; else exactly one.
    """
    raise TypeError(f"{type(form).__name__} has no rule for calls")


def _repeated(lark: Lark, one: str, between: str, many: bool) -> str:
    if not many:
        return one
    return f"{one} ({lark.text(between)} {one})*"


def _arguments(lark: Lark, schema: Mapping[str, Any]) -> str:
    return lark.json(schema, one_line=True)


@calls.register
def _(form: Tagged, lark: Lark, functions: Signatures, many: bool) -> str:
    choices = []
    for name, schema in functions.items():
        written, _, rest = form.name_format.format(name=name, index="\0").partition("\0")
        number = "/[0-9]{1,3}/" if "{index}" in form.name_format else ""
        head = f"{lark.text(form.begins[0] + form.prefix + written)} {number}"
        separator = lark.text(rest + form.separator)
        tail = lark.text(form.suffix + form.end)
        choices.append(lark.rule(f"{head} {separator} {_arguments(lark, schema)} {tail}"))
    body = _repeated(lark, lark.any_of(choices), form.between, many)
    if form.section is None:
        return body
    return f"{lark.text(form.section[0])} {body} {lark.text(form.section[1])}"


def _named_object(lark: Lark, before: str, functions: Signatures, after: str) -> str:
    return lark.any_of(
        lark.rule(
            f"{lark.text(before + _HEAD % name)} {_arguments(lark, schema)} {lark.text(after)}"
        )
        for name, schema in functions.items()
    )


_HEAD = '{"name": "%s", "arguments": '


@calls.register
def _(form: Hermes, lark: Lark, functions: Signatures, many: bool) -> str:
    one = _named_object(lark, f"{form.begins[0]}\n", functions, f"}}\n{form.end}")
    return _repeated(lark, one, "\n", many)


_ID = "/[A-Za-z0-9]{9}/"


@calls.register
def _(form: Mistral, lark: Lark, functions: Signatures, many: bool) -> str:
    begin = form.begins[0]
    if form.array:
        number = f"""({lark.text(', "id": "')} {_ID} {lark.text('"')})?"""
        one = f"{_named_object(lark, '', functions, '')} {number} {lark.text('}')}"
        return f"{lark.text(begin + '[')} {_repeated(lark, one, ', ', many)} {lark.text(']')}"
    number = f"({lark.text('[CALL_ID]')} {_ID})?" if form.with_id else ""
    one = lark.any_of(
        lark.rule(
            f"{lark.text(begin + name)} {number} {lark.text('[ARGS]')} {_arguments(lark, schema)}"
        )
        for name, schema in functions.items()
    )
    return f"{one}+" if many else one


@calls.register
def _(form: XmlCall, lark: Lark, functions: Signatures, many: bool) -> str:
    space = form.space
    begin = "" if form.begins[0] == form.name_open else form.begins[0]
    begin += space if begin and form.name_open else ""
    end = f"{form.close}{space}{form.end}" if form.end else form.close
    heads, rests = [], []
    for name, schema in functions.items():
        heads.append(f"{begin}{form.name_open}{name}{form.name_close}{space}")
        parameters = [_parameter(form, lark, schema, key) for key in schema.get("properties", {})]
        rests.append(lark.rule(" ".join((*parameters, lark.text(end)))))

    def one(before: str) -> str:
        # One literal with what stands before: apart from it, the longer of two literals that begin
        # alike would win.
        return lark.any_of(
            f"{lark.text(before + head)} {rest}" for head, rest in zip(heads, rests, strict=True)
        )

    opening, closing = form.section or ("", "")
    body = one(f"{opening}{space}" if opening else "")
    body += f" {one(space)}*" if many else ""
    return f"{body} {lark.text(space + closing)}" if closing else body


def _parameter(form: XmlCall, lark: Lark, schema: Mapping[str, Any], key: str) -> str:
    line = "\n" if form.lines else ""
    opening = f"{form.key_open}{key}{form.key_close}"
    opening += f"{form.space}{form.value_open}" if form.value_open else ""
    own = schema["properties"][key]
    head, end = lark.text(opening + line), line + form.value_close
    options = own.get("enum") if isinstance(own, Mapping) else None
    types = types_of(schema, key)
    if isinstance(options, list) and options and all(isinstance(o, str) for o in options):
        value = f"({' | '.join(lark.text(option) for option in options)}) {lark.text(end)}"
    elif types == {"boolean"}:  # some templates write Python's
        value = f"/[Tt]rue|[Ff]alse/ {lark.text(end)}"
    elif not types or "string" in types:
        value = lark.until(end)
    else:
        shared = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
        value = f"{lark.json({**own, **shared}, one_line=True)} {lark.text(end)}"
    rule = lark.rule(" ".join(part for part in (head, value, lark.text(form.space)) if part))
    return rule if key in schema.get("required", ()) else f"({rule})?"


@calls.register
def _(form: Gemma, lark: Lark, functions: Signatures, many: bool) -> str:
    one = lark.any_of(
        lark.rule(
            f"{lark.text(form.begins[0] + name)} {notation(lark, schema, schema)}"
            f" {lark.text(form.end)}"
        )
        for name, schema in functions.items()
    )
    return f"{one}+" if many else one


@calls.register
def _(form: PythonCall, lark: Lark, functions: Signatures, many: bool) -> str:
    one = lark.any_of(
        lark.rule(f"{lark.text(f'{name}(')} {_keywords(lark, schema)} {lark.text(')')}")
        for name, schema in functions.items()
    )
    body = _repeated(lark, one, ", ", many)
    return f"{lark.text(f'{form.begins[0]}[')} {body} {lark.text(f']{form.end}')}"


def _keywords(lark: Lark, schema: Mapping[str, Any]) -> str:
    """``KEY=VALUE`` of each property in its order, with commas between those that are there."""
    first = behind = ""
    for key in reversed(schema.get("properties", {})):
        value, required = _python_value(lark, schema, key), key in schema.get("required", ())
        alone = lark.rule(f"{lark.text(f'{key}=')} {value} {behind}")
        if required:
            first = alone
        else:
            first = f"({alone} | {first})" if first else f"({alone})?"
        after = f"{lark.text(f', {key}=')} {value}"
        behind = lark.rule(f"{after if required else f'({after})?'} {behind}")
    return first


_QUOTED = r"/'([^'\\]|\\[nrt'\"\\])*'/"
_NARROWS = frozenset(("const", "enum", "format", "maxLength", "minLength", "pattern"))


def _python_value(lark: Lark, schema: Mapping[str, Any], key: str) -> str:
    """JSON, or what Python has otherwise."""
    own, types = schema["properties"][key], types_of(schema, key)
    if types == {"boolean"}:
        return "/[Tt]rue|[Ff]alse/"
    shared = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
    known = own if isinstance(own, Mapping) else {}
    choices = [lark.json({**known, **shared}, one_line=True)]
    if (not types or "string" in types) and not _NARROWS & known.keys():
        choices.append(_QUOTED)
    options = known.get("enum")
    choices += [
        lark.text(f"'{option}'")
        for option in (options if isinstance(options, list) else ())
        if isinstance(option, str) and not {"'", "\\", "\n"} & {*option}
    ]
    return lark.any_of(choices)


_HEADER = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"


@calls.register
def _(form: Harmony, lark: Lark, functions: Signatures, many: bool) -> str:
    # A call ends the output: there is never more than one.
    return lark.any_of(
        lark.rule(f"{lark.text(_HEADER % name)} {_arguments(lark, schema)}")
        for name, schema in functions.items()
    )


def signatures(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names and schemas of OpenAI's ``tools``. Arguments that no schema declares are not allowed,
    unless it says so."""
    by_name: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = dict(function.get("parameters") or {})
        _check(function["name"], schema)
        schema.setdefault("type", "object")
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", False)
        by_name[function["name"]] = schema
    return by_name


def _check(name: str, schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise PykernelsError(
            f"tool {name}: its parameters are no JSON schema",
            "Give properties as an object and required as a list",
        )
