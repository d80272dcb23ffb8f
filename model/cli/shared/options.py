"""Options of a command that are the fields of dataclasses.

A command's parameter whose type is a dataclass with fields of ``runtime.planning.option`` stands
for an option of each field: name, help, default and choices are the field's, and the command is
given the object. ``Annotated[Settings, Choose(...)]`` takes some of the fields, or other names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ParamSpec, get_args, get_origin, get_type_hints

import typer

from pykernels.errors import PykernelsError
from runtime.planning.option import SAME, Option, SettingError, options_of

P = ParamSpec("P")


@dataclass(frozen=True)
class Choose:
    """Which fields of a dataclass are options of a command, and how.

    Attributes:
        only: these fields; empty: all but those of ``but``.
        names: of options that are called otherwise than their fields.
        defaults: as they are typed, in place of the fields'.
        help: in place of the fields'; ``shown``: likewise, in place of a default.
        panel: of the help.
    """

    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    help: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    panel: str | None = None


class _Group:
    """The options that one parameter stands for."""

    def __init__(self, cls: type, choose: Choose) -> None:
        self.cls, self._choose = cls, choose
        every = options_of(cls)
        self.options = {
            name: every[name] for name in choose.only or every if name not in choose.but
        }
        self._own = {each.name: each.default for each in fields(cls)}
        self.names = {name: choose.names.get(name, name) for name in self.options}
        """The parameter's name of each field."""
        self.flags = {name: "--" + given.replace("_", "-") for name, given in self.names.items()}

    def parameters(self) -> list[inspect.Parameter]:
        """What typer makes options of."""
        return [
            inspect.Parameter(
                self.names[name],
                inspect.Parameter.KEYWORD_ONLY,
                default=self._default(name),
                annotation=self._annotation(name, each),
            )
            for name, each in self.options.items()
        ]

    def _default(self, name: str) -> Any:
        if name in self._choose.defaults:
            return self._choose.defaults[name]
        text = self.options[name].text
        return self._own[name] if text is SAME else text

    def _annotation(self, name: str, each: Option) -> Any:
        default = self._default(name)
        own = each.shown if name not in self._choose.defaults else None
        shown = self._choose.shown.get(name, own)
        made = typer.Option(
            self.flags[name],  # alone: a flag has no --no-flag
            metavar=each.metavar,
            help=self._choose.help.get(name, each.help),
            show_default=True if shown is None else shown,
            min=each.least,
            max=each.most,
            rich_help_panel=self._choose.panel,
        )
        kind: Any = each.kind if default is not None else each.kind | None
        return Annotated[kind, made]

    def read(self, given: Mapping[str, Any]) -> Any:
        """The object, of what was typed for each option (None: nothing)."""
        values = {}
        for name, each in self.options.items():
            text = given[self.names[name]]
            if text is None:
                continue
            try:
                values[name] = each.read(text)
            except (ValueError, KeyError):
                raise PykernelsError(f"{self.flags[name]} {text}", each.hint) from None
        return self.cls(**values)


def with_options(function: Callable[P, None]) -> Callable[..., None]:
    """The command with an option for each field of its parameters that are dataclasses.

    What a ``SettingError`` says of a setting it says of the option then.
    """
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    groups = {
        name: group for name in signature.parameters if (group := _group(hints[name])) is not None
    }
    if not groups:
        return function
    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            shown += groups[name].parameters()
        else:
            keyword = inspect.Parameter.KEYWORD_ONLY
            shown.append(parameter.replace(annotation=hints[name], kind=keyword))

    @functools.wraps(function)
    def wrapped(**given: Any) -> None:
        flags = {name: flag for each in groups.values() for name, flag in each.flags.items()}
        texts = {
            name: given[option] for each in groups.values() for name, option in each.names.items()
        }
        try:
            made = {name: group.read(given) for name, group in groups.items()}
            taken = {option for each in groups.values() for option in each.names.values()}
            rest = {name: value for name, value in given.items() if name not in taken}
            function(**made, **rest)  # type: ignore[call-arg]
        except SettingError as error:
            raise error.typed(flags, texts) from error

    wrapped.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in shown}
    return wrapped


def _group(hint: Any) -> _Group | None:
    """The group that a parameter of this type stands for; None: it is an option itself."""
    choose = Choose()
    if get_origin(hint) is Annotated:
        hint, *others = get_args(hint)
        choose = next((each for each in others if isinstance(each, Choose)), choose)
    return _Group(hint, choose) if isinstance(hint, type) and is_dataclass(hint) else None
