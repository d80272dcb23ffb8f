"""python -m bench.cpu: measures, prints the table, writes bench/results/<cpu>/<date>.*."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.peers.catalog import ROOT
from model.cli_common import EXIT_ERROR, EXIT_INTERRUPTED, prepare_threads
from pykernels.errors import PykernelsError


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a run of about a minute")
    parser.add_argument("--formats", metavar="A,B", help="weight formats (default: all)")
    parser.add_argument(
        "--tokens", metavar="N,M/expert", help="of a call, e.g. 1,4,64/expert (default: by CPU)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: every usable core")
    parser.add_argument("--no-peers", action="store_true", help="our kernels alone")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench/results", metavar="DIR", help="results folder"
    )
    parser.add_argument("--debug", action="store_true", help="tracebacks")
    return parser.parse_args(arguments)


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """The run that the options ask for, with a progress bar on stderr."""
    prepare_threads(chosen.threads)  # before torch is imported
    from pykernels.target import detect

    from .cases import Settings, Tokens
    from .estimate import in_words
    from .run import Run

    tokens = tuple(Tokens.parse(t) for t in chosen.tokens.split(",")) if chosen.tokens else None
    target = detect()
    settings = Settings.make(
        target,
        formats=tuple(chosen.formats.split(",")) if chosen.formats else None,
        tokens=tokens,
        threads=chosen.threads,
        peers=not chosen.no_peers,
        quick=chosen.quick,
    )
    run = Run(settings, target)
    formats, calls = ", ".join(settings.formats), ", ".join(map(str, settings.tokens))
    console = Console(stderr=True)
    console.print(
        f"{formats} with {calls} tokens, {settings.threads} threads: {in_words(run.seconds)} where"
        " nobody else uses the machine",
        markup=False,
        highlight=False,
    )
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    left = TextColumn("left"), TimeRemainingColumn()
    began = time.monotonic()
    with Progress(*columns, *left, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=run.seconds)
        results = run.measure(
            lambda what, done, whole: progress.update(
                bar, description=what, completed=done, total=whole
            )
        )
    results["machine"]["minutes"] = round((time.monotonic() - began) / 60, 1)
    return results


def write(results: dict[str, Any], out: Path) -> list[Path]:
    """JSON, plots and the Markdown page; the paths written."""
    from .plots import draw
    from .report import markdown

    folder = out / results["machine"]["slug"]
    day, quick = results["machine"]["date"].split()[0], results["settings"]["quick"]
    stem = f"{day}-quick" if quick else day
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(json.dumps(results, indent=1) + "\n")
    plots = draw(results, folder, stem)
    page.write_text(markdown(results, [path.name for path in plots]))
    return [data, page, *plots]


def main() -> int:
    chosen = options()
    try:
        try:
            import matplotlib  # noqa: F401 - before minutes of measuring, not after
        except ImportError:
            raise PykernelsError(
                "matplotlib is not installed", "Install it: pip install -e '.[bench]'"
            ) from None
        results = measure(chosen)
        from .report import terminal

        Console(width=None if sys.stdout.isatty() else 170).print(terminal(results))
        for path in write(results, chosen.out):
            print(path)
    except PykernelsError as error:
        if chosen.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
