"""python -m bench.ablation: decode of a model with one idea more at a time, as a table and a plot.

On the CPU: the kernels, one call a step, nodes that wait only for what they read. With --device
cuda:0 (the experts on the CPU): the kernels, the CUDA graph, two microbatches of two sequences or
more, Expert Deferral. Stages take turns; writes bench/results/<machine>/<date>-ablation.*.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench.e2e.options import add_model_options, prepared
from bench.harness.keeping.ending import end_on_signals
from bench.harness.session import add_run_options, measure_and_keep, run_command
from bench.tables.ablation import line

from .run import AblationRun, Settings


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--arch", default="qwen3-30b", metavar="NAME", help="default: qwen3-30b")
    add("--format", default="q4_k", metavar="NAME", help="default: q4_k")
    add("--tokens", type=int, default=32, metavar="N", help="decode steps of a turn (default: 32)")
    add("--context", type=int, default=512, metavar="N", help="before them (default: 512)")
    add("--batches", default="1", metavar="N,M", help="sequences at once (default: 1)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each (default: 3)")
    add("--eager", action="store_true", help="begin with transformers' own model")
    add_run_options(parser)
    return parser.parse_args(arguments)


def prepare(chosen: argparse.Namespace) -> AblationRun:
    """The run that the options ask for. Raises PykernelsError for what cannot be."""
    shared = prepared(chosen)
    from bench.harness.settings import parse_counts
    from pykernels.target import detect

    settings = Settings(
        arch=chosen.arch,
        fmt=chosen.format,
        tokens=chosen.tokens,
        context=chosen.context,
        batches=parse_counts(chosen.batches),
        rounds=chosen.rounds,
        eager=chosen.eager,
        **shared,
    )
    return AblationRun(settings, detect())


def measure(run: AblationRun, out: Path) -> None:
    """The run, with its rows on stderr."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with console.status("", spinner_style="dim") as status:
        run.step = lambda what, done, whole: status.update(f"{what} …")
        measure_and_keep(run, out, lambda row: console.print(line(row)))


def main(arguments: list[str] | None = None) -> int:
    return run_command(options(arguments), prepare, measure)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
