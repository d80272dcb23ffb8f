"""python -m bench.gpu: times the GPU's kernels, writes bench/results/<gpu>/<date>.*."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.files import check_folder
from bench.harness.keeping.ending import end_on_signals
from bench.harness.keeping.provenance import provenance
from bench.harness.report import line
from bench.harness.session import EXIT_FAILED, exit_code, measure_and_keep
from bench.peers.catalog import RESULTS
from pykernels.errors import PykernelsError


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
    values: dict[str, int | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise PykernelsError(f"{pair!r} is no NAME=VALUE", "Write tokens=1, for example")
        number = value.removeprefix("-").isdecimal()
        values[name] = int(value) if number else value
    return values


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
    """A row on stdout; in JSON one that failed also on stderr, in words."""
    print(json.dumps(row) if as_json else line(row), flush=True)
    if as_json and "why" in row:
        print(line(row), file=sys.stderr, flush=True)


def measure(chosen: argparse.Namespace) -> int:
    """The run that the options ask for; the exit code: whether a case failed."""
    began = time.monotonic()
    check(chosen)
    from bench.cases.gpu_run import OPS, GpuRun, one_case
    from bench.cases.processes import compile_ahead, in_a_new_process
    from bench.harness.machine import check_gpu
    from bench.harness.timing.roofs import measure_roofs

    ops = OPS if chosen.op == "all" else tuple(chosen.op.split(","))
    if unknown := [op for op in ops if op not in OPS]:
        raise PykernelsError(f"There is no op {unknown[0]!r}", f"Use one of {', '.join(OPS)}")
    device = check_gpu(chosen.device)
    if chosen.case is not None:
        row = one_case(ops[0], flags(chosen.case), device, chosen.seconds)
        show(provenance() | row if chosen.json else row, chosen.json)
        return 0
    if not chosen.no_ahead:
        limit = 30 * chosen.minutes or None
        ended, processes = compile_ahead(ops, chosen.device, chosen.quick, limit)
        took = time.monotonic() - began
        all_of = f"{ended} of {processes} processes have compiled all of their cases"
        print(f"{took:.0f} s: {all_of}", file=sys.stderr, flush=True)
    run = GpuRun(
        ops,
        device,
        measure_roofs(device),
        chosen.seconds,
        chosen.quick,
        () if chosen.op == "all" else ops,
        chosen.skip,
        chosen.minutes,
        began,
    )
    passed = ["--no-ahead", "--seconds", str(chosen.seconds), "--device", chosen.device]
    run.go_on = in_a_new_process(ops, passed + ["--quick"] * chosen.quick, run.until)
    head = run.head()
    roofs = {"op": "roofs", "name": head["headline"], **head["roofs"]} | provenance()
    print(json.dumps(roofs), flush=True, file=sys.stdout if chosen.json else sys.stderr)
    out = None if chosen.no_files else chosen.out
    results = measure_and_keep(run, out, lambda row: show(row, chosen.json))
    return EXIT_FAILED if any("why" in row for row in results["rows"]) else 0


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    return exit_code(lambda: measure(chosen), chosen.debug)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
