"""pykernels bench e2e --archs A,B: whole models, ours beside llama.cpp and transformers, in turns.

Random weights of real shapes, so many layers of them; writes bench/results/<machine>/<date>-e2e.*.
With --device cuda:0 ours plays on the CPU alone, with the experts on the CPU (with deferral and
without) and whole on the GPU, and llama.cpp with its experts on the CPU and whole on the GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bench.harness.budget import bar
from bench.harness.keeping.as_module import run
from bench.harness.keeping.ending import ending_on_signals
from bench.harness.session import add_run_options, measure_and_keep, run_command
from bench.tables.e2e import line
from pykernels.env import env

from .options import add_model_options, prepared

if TYPE_CHECKING:
    from .run import E2ERun

_COUNTS = "N,M"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="pykernels bench e2e", description=__doc__, allow_abbrev=False
    )
    add_model_options(parser)
    add = parser.add_argument
    add("--quick", action="store_true", help="one format, one turn: a first look")
    add("--archs", default="qwen3-30b", metavar="A,B", help="default: qwen3-30b")
    add("--formats", metavar="A,B", help="default: bf16,q8_0,q4_k (--quick: q8_0)")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    add("--tokens", type=int, default=64, metavar="N", help="decode steps (default: 64)")
    add("--batches", metavar=_COUNTS, help="sequences at once (default: 1,8; --quick: 1)")
    add("--contexts", default="512", metavar=_COUNTS, help="before a decode (default: 512)")
    add("--rounds", type=int, metavar="N", help="turns of each (default: 3; --quick: 1)")
    add("--minutes", type=float, metavar="M", help="begin no turn beyond that (default: no limit)")
    add("--peers", metavar="A,B", help="default: llama.cpp,transformers; with a GPU: llama.cpp")
    add("--no-peers", action="store_true", help="our engine alone")
    add("--keep", action="store_true", help="leave the GGUF files in PYKERNELS_CACHE_DIR")
    add_run_options(parser)
    return parser


def prepare(chosen: argparse.Namespace) -> E2ERun:
    """The run that the options ask for. Raises PykernelsError for what cannot be."""
    shared = prepared(chosen)
    from bench.harness.settings import parse_counts
    from pykernels.target import detect

    from .run import E2ERun
    from .settings import PEERS, Settings

    peers = chosen.peers.split(",") if chosen.peers else PEERS[: 2 if chosen.device == "cpu" else 1]
    quick = chosen.quick
    formats = chosen.formats or ("q8_0" if quick else "bf16,q8_0,q4_k")
    settings = Settings(
        archs=tuple(dict.fromkeys(chosen.archs.split(","))),
        formats=tuple(dict.fromkeys(formats.split(","))),
        prompt=chosen.prompt,
        tokens=chosen.tokens,
        batches=parse_counts(chosen.batches or ("1" if quick else "1,8")),
        contexts=parse_counts(chosen.contexts),
        rounds=(1 if quick else 3) if chosen.rounds is None else chosen.rounds,
        peers=() if chosen.no_peers else tuple(peers),
        quick=quick,
        keep=chosen.keep,
        minutes=chosen.minutes,
        folder=Path(env.cache_dir).expanduser() / "gguf",
        **shared,
    )
    return E2ERun(settings, detect())


def measure(run: E2ERun, out: Path) -> None:
    """The run, with its rows and a progress bar on stderr."""
    s = run.settings
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{', '.join(s.archs)}, {s.layers} layers, in {', '.join(s.formats)}, {s.threads} threads:"
        f" {s.rounds} turn{'s' * (s.rounds > 1)} of ours{''.join(f', {p}' for p in s.peers)}"
    )
    with bar(len(s.archs) * len(s.formats) * run.turns) as run.bar:
        measure_and_keep(run, out, lambda row: console.print(line(row)))


def main(arguments: list[str] | None = None) -> int:
    with ending_on_signals():
        return run_command(parser().parse_args(arguments), prepare, measure)


if __name__ == "__main__":
    run("e2e")
