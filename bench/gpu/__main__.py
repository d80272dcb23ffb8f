"""python -m bench.gpu: times the GPU's kernels, writes bench/results/<gpu>/<date>.*."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.files import Partial, Results, check_folder, unused, write_texts, writing
from bench.peers.catalog import RESULTS
from model.cli.common import EXIT_ERROR, EXIT_INTERRUPTED
from pykernels.errors import PykernelsError

from .report import line, markdown

EXIT_FAILED_CASES = 1


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--op", default="all", metavar="A,B", help="ops (default: all)")
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument(
        "--seconds", type=float, default=0.1, metavar="S", help="each time (default: 0.1)"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, metavar="N", help="then begin no further case"
    )
    parser.add_argument("--json", action="store_true", help="one flat JSON object a case on stdout")
    parser.add_argument(
        "--case", nargs="*", metavar="NAME=VALUE", help="of one --op, just this case; no files"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="results folder")
    parser.add_argument("--no-files", action="store_true", help="write no files")
    parser.add_argument(
        "--no-ahead", action="store_true", help="compile each kernel when it is timed, not before"
    )
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="cases that were timed")
    parser.add_argument("--debug", action="store_true", help="tracebacks")
    return parser.parse_args(arguments)


def flags(pairs: list[str]) -> dict[str, int | str]:
    """NAME=VALUE as keyword arguments; numbers become integers."""
    found: dict[str, int | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise PykernelsError(f"{pair!r} is no NAME=VALUE", "Write tokens=1, for example")
        number = value.removeprefix("-").isdecimal()
        found[name] = int(value) if number else value
    return found


def check(chosen: argparse.Namespace) -> None:
    """Raises PykernelsError for options that no run can be made of."""
    if not 0 < chosen.seconds < float("inf"):
        raise PykernelsError(f"{chosen.seconds:g} seconds", "Give a positive number to --seconds")
    if not 0 <= chosen.minutes < float("inf"):
        raise PykernelsError(
            f"{chosen.minutes:g} minutes", "Give a positive number, or no --minutes"
        )
    if chosen.case is not None and (chosen.op == "all" or "," in chosen.op):
        raise PykernelsError(f"--case is of one op, not of {chosen.op}", "Give --op moe, say")
    if chosen.case is None and not chosen.no_files:
        check_folder(chosen.out)


def show(row: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(row) if as_json else line(row), flush=True)


def measured(chosen: argparse.Namespace, results: Results, partial: Partial) -> None:
    """The run that the options ask for; each row shown, and in ``results``, as soon as it is there.

    With ``ended``, why cases are missing.
    """
    began = time.monotonic()
    check(chosen)
    from .ahead import compile_ahead
    from .machine import check_gpu, describe
    from .roofs import measure_roofs
    from .run import OPS, in_a_new_process, one_case, rows_of

    ops = OPS if chosen.op == "all" else tuple(chosen.op.split(","))
    if unknown := [op for op in ops if op not in OPS]:
        raise PykernelsError(f"There is no op {unknown[0]!r}", f"Use one of {', '.join(OPS)}")
    until = began + 60 * chosen.minutes if chosen.minutes else None
    device = check_gpu(chosen.device)
    if chosen.case is not None:
        results["rows"].append(one_case(ops[0], flags(chosen.case), device, chosen.seconds))
        show(results["rows"][0], chosen.json)
        return
    if not chosen.no_ahead:
        limit = 30 * chosen.minutes or None
        ended, processes = compile_ahead(ops, chosen.device, chosen.quick, limit)
        took = time.monotonic() - began
        all_of = f"{ended} of {processes} processes have compiled all of their cases"
        print(f"{took:.0f} s: {all_of}", file=sys.stderr, flush=True)
    machine, roofs = describe(device), measure_roofs(device)
    results |= {
        "machine": machine, "roofs": asdict(roofs), "quick": chosen.quick, "op": chosen.op,
        "ended": "the run was killed",
    }  # fmt: skip
    head = {"op": "roofs", "name": machine["gpu"], **results["roofs"]}
    print(json.dumps(head), flush=True, file=sys.stdout if chosen.json else sys.stderr)
    passed = ["--no-ahead", "--seconds", str(chosen.seconds), "--device", chosen.device]
    again = in_a_new_process(ops, passed + ["--quick"] * chosen.quick, until)
    for row in rows_of(
        ops, device, roofs, chosen.seconds, chosen.quick, chosen.skip, again, until
    ):  # fmt: skip
        results["rows"].append(row)
        if not chosen.no_files:
            partial.keep(results)
        show(row, chosen.json)
        if chosen.json and "why" in row:
            print(line(row), file=sys.stderr, flush=True)
    over = until is not None and time.monotonic() >= until
    results["ended"] = f"{chosen.minutes:g} minutes were over" if over else ""


def stem(results: Results) -> str:
    """Name of a run's files: "2031-02-03", "2031-02-03-quick-moe"."""
    parts = [results["machine"]["date"].split()[0], *(["quick"] if results["quick"] else [])]
    return "-".join(parts if results["op"] == "all" else [*parts, *results["op"].split(",")])


def write(results: Results, out: Path, name: str) -> list[Path]:
    """JSON, the Markdown page and the picture; the paths written."""
    from .plots import draw

    folder = out / results["machine"]["slug"]
    picture = folder / f"{name}.png"
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            drawn = draw(results, picture)
    except ImportError:
        print("note: no plot without matplotlib: pip install matplotlib", file=sys.stderr)
        drawn = False
    page = markdown(results, picture.name if drawn else None)
    return [*write_texts(results, folder, name, page), *([picture] if drawn else [])]


def keep(results: Results, chosen: argparse.Namespace, partial: Partial) -> None:
    """Writes the files: under the run's name, or beside it those of a run that was ended."""
    whole = results["ended"] == "" or results["ended"].endswith("over")
    folder = chosen.out / results["machine"]["slug"]
    name = unused(folder, stem(results)) if whole else partial.name
    for path in write(results, chosen.out, name):
        print(path, file=sys.stderr)
    if whole:
        partial.drop()


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    results: Results = {"rows": []}
    partial = Partial(chosen.out, stem, lambda found: markdown(found, None))
    code = EXIT_FAILED_CASES
    try:
        try:
            measured(chosen, results, partial)
        except KeyboardInterrupt:
            results["ended"], code = "it was interrupted", EXIT_INTERRUPTED
        if results["rows"] and chosen.case is None and not chosen.no_files:
            keep(results, chosen, partial)
    except PykernelsError as error:
        if chosen.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except Exception as error:
        if chosen.debug:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        print(f"error: unexpected {what}. --debug shows the traceback.", file=sys.stderr)
        return EXIT_FAILED_CASES
    failed = any("why" in row for row in results["rows"])
    return code if failed or code == EXIT_INTERRUPTED else 0


def _end(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would end the writing
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
