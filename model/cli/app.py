"""The commands of `pykernels`: generate, chat, serve, convert, doctor, inspect ..."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from typing import Annotated

import typer

from pykernels import __version__

from ..startup.standard_streams import settle_standard_streams
from . import (
    calibrate,
    chat,
    convert,
    doctor,
    evaluate,
    generate,
    inspect,
    kv,
    plan,
    profile,
    upcycle,
)
from .http import serve
from .shared.common import Debug, State, out
from .shared.formats import ListsFormats
from .usage import Commands

ABOUT = "Run Mixture-of-Experts language models on a CPU, or on a CPU and GPUs together."

app = typer.Typer(
    name="pykernels",
    cls=Commands,
    help=ABOUT,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("convert", cls=ListsFormats)(convert.convert)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("calibrate", cls=ListsFormats)(calibrate.calibrate)
app.command("upcycle")(upcycle.upcycle)
app.add_typer(evaluate.app, name="eval")
app.add_typer(profile.app, name="profile")
app.add_typer(kv.app, name="kv")

PLUGINS = {"bench": "bench.cli"}
"""Groups of commands from packages that may be installed beside this one: name -> module."""


def _add_plugins() -> None:
    for name, module in PLUGINS.items():
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) and importlib.util.find_spec(module):
            app.add_typer(importlib.import_module(module).app, name=name)


_add_plugins()


def _version(value: bool) -> None:
    if value:
        out().print(f"pykernels {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    State.debug = debug


ALLOCATIONS = 100_000
"""Between two looks for garbage: a start makes modules and kernels, of which none is any, and with
Python's 700 a tenth of its time went into looking."""


def run() -> None:
    """Runs the command that this process's arguments name, and ends the process."""
    settle_standard_streams()
    gc.set_threshold(ALLOCATIONS, 20, 20)
    if os.environ.get("COLUMNS") == "0":  # a terminal without a size: rich would print nothing
        del os.environ["COLUMNS"]
    app(prog_name="pykernels")  # else the folder of `python -m bench.NAME` is put in front
