"""The command line, `pykernels`: generate, chat, doctor, calibrate, bench."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pykernels import __version__

from . import cli_bench, cli_bench_gpu, cli_calibrate, cli_doctor, cli_generate
from .cli_common import Debug, State, out
from .cli_formats import ListsFormats

app = typer.Typer(
    name="pykernels",
    help="Run Mixture-of-Experts models with their routed experts on the CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(no_args_is_help=True, help="Time the kernels on this machine.")

app.command("generate")(cli_generate.generate)
app.command("chat")(cli_generate.chat)
app.command("doctor")(cli_doctor.doctor)
app.command("calibrate", cls=ListsFormats)(cli_calibrate.calibrate)
bench.command("moe", cls=ListsFormats)(cli_bench.moe)
bench.command("attention")(cli_bench_gpu.attention)
bench.command("linear")(cli_bench_gpu.linear)
bench.command("router")(cli_bench_gpu.router)
app.add_typer(bench, name="bench")


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
    """Run Mixture-of-Experts models with their routed experts on the CPU."""
    State.debug = debug


def main() -> None:
    """Entry point of the console script."""
    if os.environ.get("COLUMNS") == "0":  # a terminal without a size: rich would print nothing
        del os.environ["COLUMNS"]
    app()


if __name__ == "__main__":
    main()
