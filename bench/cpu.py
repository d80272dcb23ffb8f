"""python -m bench.cpu: times the experts on the CPU, writes bench/results/<cpu>/<date>.*."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.harness.keeping.ending import end_on_signals
from bench.harness.report import line
from bench.harness.session import add_run_options, measure_and_keep, run_command
from bench.peers.catalog import ENGINES
from model.cli.shared.common import prepare_threads
from pykernels.env import env
from pykernels.registry import requested

if TYPE_CHECKING:
    from bench.cases.cpu_run import CpuRun


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a run of about two minutes, for a first look"
    )
    parser.add_argument(
        "--sections", metavar="A,B", help="of table, skew, latency, threads (default: all)"
    )
    parser.add_argument("--formats", metavar="A,B", help="weight formats (default: all)")
    parser.add_argument(
        "--tokens", metavar="N,M/expert", help="of a call, e.g. 1,4,64/expert (default: by CPU)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="default: PYKERNELS_THREADS, else every usable core",
    )
    parser.add_argument(
        "--peer-threads",
        metavar="N,M",
        help="a peer is tried on each, the best is timed (default: --threads, beyond 4 also half)",
    )
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument(
        "--peers",
        metavar="A,B",
        help=f"of {', '.join(ENGINES)}: where memory is short, fewer leave room for more experts"
        " (default: all)",
    )
    peers.add_argument("--no-peers", action="store_true", help="our kernels alone")
    parser.add_argument(
        "--minutes", type=float, default=0.0, metavar="N", help="then begin no further part"
    )
    add_run_options(parser)
    return parser.parse_args(arguments)


def prepare(chosen: argparse.Namespace) -> CpuRun:
    """The run that the options ask for. Raises PykernelsError for what cannot be."""
    env.check()
    requested()
    threads = prepare_threads(chosen.threads)  # before torch is imported
    from bench.cases.cpu_run import CpuRun
    from bench.harness.settings import SECTIONS, Settings, Tokens, parse_counts
    from pykernels.target import detect

    tokens = None
    if chosen.tokens is not None:
        tokens = tuple(Tokens.parse(t) for t in chosen.tokens.split(","))
    peers = ENGINES if chosen.peers is None else tuple(chosen.peers.split(","))
    target = detect()
    settings = Settings.make(
        target,
        formats=None if chosen.formats is None else tuple(chosen.formats.split(",")),
        tokens=tokens,
        sections=SECTIONS if chosen.sections is None else tuple(chosen.sections.split(",")),
        threads=threads,
        peer_threads=None if chosen.peer_threads is None else parse_counts(chosen.peer_threads),
        peers=() if chosen.no_peers else peers,
        quick=chosen.quick,
        minutes=chosen.minutes,
    )
    return CpuRun(settings, target)


def measure(run: CpuRun, out: Path) -> None:
    """The run, with its rows and a progress bar on stderr."""
    from bench.harness.estimate import in_words

    settings = run.settings
    formats, calls = ", ".join(settings.formats), ", ".join(map(str, settings.tokens))
    at_most = f", {settings.minutes:g} at most" if settings.minutes else ""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{', '.join(settings.sections)} of {formats} with {calls} tokens, {settings.threads}"
        f" threads: {in_words(run.seconds)}{at_most} if nothing else runs on the machine"
    )
    if run.fewer_experts:
        console.print(run.fewer_experts)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    left = TextColumn("left"), TimeRemainingColumn()
    with Progress(*columns, *left, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=run.seconds)
        run.step = lambda what, done, whole: progress.update(
            bar, description=what, completed=done, total=whole
        )
        measure_and_keep(run, out, lambda row: console.print(line(row)))


def main(arguments: list[str] | None = None) -> int:
    return run_command(options(arguments), prepare, measure)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
