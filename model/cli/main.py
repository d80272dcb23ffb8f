"""The command line, `pykernels`: generate, chat, doctor, calibrate, bench."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pykernels import __version__

from . import bench as cli_bench
from . import bench_gpu, calibrate, doctor, generate
from .common import Debug, State, out
from .formats import ListsFormats

app = typer.Typer(
    name="pykernels",
    help="Run Mixture-of-Experts models with their routed experts on the CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(no_args_is_help=True, help="Time the kernels on this machine.")

app.command("generate")(generate.generate)
app.command("chat")(generate.chat)
app.command("doctor")(doctor.doctor)
app.command("calibrate", cls=ListsFormats)(calibrate.calibrate)
bench.command("moe", cls=ListsFormats)(cli_bench.moe)
bench.command("attention")(bench_gpu.attention)
bench.command("linear")(bench_gpu.linear)
bench.command("router")(bench_gpu.router)
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
