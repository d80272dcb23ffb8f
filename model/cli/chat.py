"""`pykernels chat`: a conversation, turn by turn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.engine.scheduling.config import EngineConfig
from runtime.planning.config import ExecutionConfig
from runtime.planning.option import options_of

from ..startup.standard_streams import argument_text
from .http.remote import Remote
from .shared.common import Debug, command, err, note, read_key
from .shared.execution import Chosen
from .shared.model_options import DRAFTS, Dtype, Eager, Model, Rules, Sampling
from .shared.options import Choose
from .shared.session import Session, check_stdin, read_stdin, summary

OF_ENGINE = Choose(only=("max_model_len", *DRAFTS.only))
LOADING = ("model", "rules", "dtype", "eager", *options_of(ExecutionConfig), *OF_ENGINE.only)
"""Options that say how a model is loaded."""

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@command
def chat(
    context: typer.Context,
    sampling: Annotated[Sampling, Choose(defaults={"max_new_tokens": 256})],
    execution: Chosen,
    engine: Annotated[EngineConfig, OF_ENGINE],
    model: Model = None,
    rules: Rules = None,
    dtype: Dtype = None,
    eager: Eager = False,
    system: Annotated[str, typer.Option(help="System message, put before the conversation.")] = "",
    url: Annotated[
        str | None,
        typer.Option(help="A server to talk with, which has its own model: see serve."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its first line is the server's key.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Talk with the model, turn by turn; /reset forgets, /exit or Ctrl-D leaves."""
    check_stdin()
    system = argument_text(system)
    if url is not None:
        _refuse_with_url(context)
        asked = sampling.as_dict()
        asked["max_tokens"] = asked.pop("max_new_tokens")
        remote = Remote(url, read_key(api_key_file), asked)
        name = remote.model()
        _talk(lambda messages: remote.write(name, messages), system)
        return
    if api_key_file is not None:
        raise PykernelsError("--api-key-file is for a server", "Add --url")
    session = Session(model, rules, dtype, eager, execution, engine, sampling)

    def answer(messages: list[dict[str, str]]) -> tuple[str, str]:
        ids = session.encode_chat(messages)
        session.check_room(len(ids))
        text, stats = session.write(ids)
        return text, summary(stats, None)

    if not getattr(session.tokenizer, "chat_template", None):
        note("this model was not trained to chat: it goes on from a plain transcript")
    _talk(answer, system)


def _refuse_with_url(context: typer.Context) -> None:
    """Raises PykernelsError for an option of a model that the server has loaded already."""
    for name in LOADING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise PykernelsError(f"{option} is for a model of this process", "Leave out --url")


def _talk(answer: Callable[[list[dict[str, str]]], tuple[str, str]], system: str) -> None:
    """Asks, and has answers written.

    Args:
        answer: writes one to a conversation; returns it with its figures.
    """
    note(COMMANDS)
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := _ask()) is not None:
        if line == "/reset":
            messages = list(first)
            note("the conversation is forgotten")
            continue
        if re.fullmatch(r"/\w+", line):  # /help, or one that is mistyped: no question to a model
            note(COMMANDS)
            continue
        if not line:
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            text, figures = answer(turn)
        except KeyboardInterrupt:
            note("stopped; this turn is forgotten")
            continue
        except PykernelsError as error:  # a full context, for one: the conversation goes on
            err().print(f"error: {error}", markup=False)
            continue
        messages = [*turn, {"role": "assistant", "content": text}]
        err().print(figures, style="dim", markup=False)


def _ask() -> str | None:
    """The next line that the user types; None at /exit and at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() a history and line editing)

        err().print("you", style="bold cyan", end="")
    try:
        line = read_stdin(lambda: input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return None
    return None if line == "/exit" else line
