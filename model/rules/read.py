"""Rules from YAML or from Python; what is wrong with them is one line: file:line: cause."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pykernels.errors import PykernelsError

from .schema import KEYS, Rule

Where = Callable[[tuple[Any, ...]], str]
"""A path in an entry to the place that an error names."""


def load_rules(file: Path) -> list[Rule]:
    """Parse a rules file.

    Raises:
        PykernelsError: it cannot be read, or is no list of rules; the file and the line.
    """
    try:
        loader = yaml.SafeLoader(file.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        _check_keys(root, file)
        entries = None if root is None else loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PykernelsError(
            f"The rules {file} cannot be read: {reason}", "Give an existing YAML file"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise PykernelsError(f"{place}: this is not valid YAML: {reason}", "Correct it") from None
    if not isinstance(entries, list):
        raise PykernelsError(
            f"{file} is no list of rules", "Write a list of items with match and replace"
        )
    assert root is not None
    return [
        _parse(entry, lambda path, node=node: f"{file}:{_line(node, path)}")  # type: ignore[misc]
        for entry, node in zip(entries, root.value, strict=True)
    ]


def parse_rules(entries: object, origin: str) -> list[Rule]:
    """A list of mappings (or ready `Rule`s) to rules; errors have its name and the number."""
    if not isinstance(entries, Iterable) or isinstance(entries, (str, dict)):
        raise PykernelsError(
            f"{origin} is no list of rules", "Write a list of items with match and replace"
        )
    return [
        _parse(entry, lambda _, i=i: f"{origin}, rule {i}")  # type: ignore[misc]
        for i, entry in enumerate(entries, 1)
    ]


def _parse(entry: object, where: Where) -> Rule:
    if isinstance(entry, Rule):
        return entry
    if not isinstance(entry, dict):
        raise PykernelsError(
            f"{where(())}: {entry!r} is no rule", "Write a mapping with the keys match and replace"
        )
    try:
        rule = Rule.model_validate(entry)
    except ValidationError as error:
        raise _mistake(error, where) from None
    rule._origin = where(())
    return rule


def _mistake(error: ValidationError, where: Where) -> PykernelsError:
    """The first thing that is wrong with an entry; a key that is not known before all others,
    since it is why another one is missing."""
    error_ = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")[0]
    path, kind = tuple(error_["loc"]), error_["type"]
    name, parents = str(path[-1]) if path else "", tuple(map(str, path[:-1]))
    inside = f" in {'.'.join(parents)}" if parents else ""
    if kind == "extra_forbidden":
        known = KEYS.get(parents, ())
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"Did you mean {near[0]}?" if near else f"The keys there are {', '.join(known)}"
        return PykernelsError(f"{where(path)}: unknown key {name!r}{inside}", hint)
    if kind == "missing":
        return PykernelsError(f"{where(path[:-1])}: {name} is missing{inside}", "Add it")
    reason = error_["msg"].removeprefix("Value error, ")
    place = ".".join(map(str, path))
    return PykernelsError(f"{where(path)}: {place}: {reason}", "Correct the rule")


def _line(node: yaml.Node, path: tuple[Any, ...]) -> int:
    """The line of what stands at a path in a node; of the last part of it that there is."""
    line = node.start_mark.line + 1
    for part in path:
        if not isinstance(node, yaml.MappingNode):
            break
        for key, value in node.value:
            if key.value == str(part):
                line, node = key.start_mark.line + 1, value
                break
        else:
            break
    return line


def _check_keys(node: yaml.Node | None, file: Path) -> None:
    """Raise `PykernelsError` for a key that stands twice in a mapping: YAML keeps the last one."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise PykernelsError(
                    f"{file}:{line}: {key.value} stands twice, in line {seen[key.value]} too",
                    "Begin a new rule with a dash, or drop one",
                )
            seen[key.value] = line
            _check_keys(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, file)
