"""python -m bench.gpu: times the GPU's kernels, writes bench/results/<gpu>/<date>.*."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.catalog import ROOT
from model.cli_common import EXIT_ERROR, EXIT_INTERRUPTED
from pykernels.errors import PykernelsError

from .report import line, markdown

EXIT_FAILED_CASES = 1


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--op", default="all", metavar="A,B", help="ops (default: all)")
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--quick", action="store_true", help="few cases, a fifth of a second each")
    parser.add_argument("--seconds", type=float, metavar="S", help="a case (default: 0.4)")
    parser.add_argument("--json", action="store_true", help="one flat JSON object a case on stdout")
    parser.add_argument(
        "--case", nargs="*", metavar="NAME=VALUE", help="of one --op, just this case; no files"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench/results", metavar="DIR", help="results folder"
    )
    parser.add_argument("--no-files", action="store_true", help="write no files")
    parser.add_argument(
        "--no-ahead", action="store_true", help="compile each kernel when it is timed, not before"
    )
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="cases of the first op")
    parser.add_argument("--debug", action="store_true", help="tracebacks")
    return parser.parse_args(arguments)


def flags(pairs: list[str]) -> dict[str, int | str]:
    """NAME=VALUE as keyword arguments; numbers become integers."""
    found: dict[str, int | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise PykernelsError(f"{pair!r} is no NAME=VALUE", "Write tokens=1, for example")
        number = value.removeprefix("-").isdigit()
        found[name] = int(value) if number else value
    return found


def show(row: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(row) if as_json else line(row), flush=True)


def measured(chosen: argparse.Namespace) -> dict[str, Any]:
    """The run that the options ask for, each row shown as soon as it is there."""
    from .ahead import compile_ahead
    from .machine import check_gpu, describe
    from .roofs import measure_roofs
    from .run import OPS, in_a_new_process, one_case, rows_of

    ops = OPS if chosen.op == "all" else tuple(chosen.op.split(","))
    if unknown := [op for op in ops if op not in OPS]:
        raise PykernelsError(f"There is no op {unknown[0]!r}", f"Use one of {', '.join(OPS)}")
    seconds = chosen.seconds or (0.2 if chosen.quick else 0.4)
    device = check_gpu(chosen.device)
    if chosen.case is not None:
        row = one_case(ops[0], flags(chosen.case), device, seconds)
        show(row, chosen.json)
        return {"rows": [row]}
    if not chosen.no_ahead:
        began = time.perf_counter()
        calls = compile_ahead(ops, chosen.device, chosen.quick)
        took = time.perf_counter() - began
        print(f"{calls} calls compiled in {took:.0f} s", file=sys.stderr, flush=True)
    machine, roofs = describe(device), measure_roofs(device)
    head = {"op": "roofs", "name": machine["gpu"], **asdict(roofs)}
    print(json.dumps(head), flush=True, file=sys.stdout if chosen.json else sys.stderr)
    passed = ["--no-ahead", "--seconds", str(seconds), "--device", chosen.device]
    again = in_a_new_process(ops, passed + ["--quick"] * chosen.quick)
    rows = []
    for row in rows_of(ops, device, roofs, seconds, chosen.quick, chosen.skip, again):
        rows.append(row)
        show(row, chosen.json)
        if chosen.json and "why" in row:
            print(line(row), file=sys.stderr, flush=True)
    return {"machine": machine, "roofs": asdict(roofs), "quick": chosen.quick, "rows": rows}


def write(results: dict[str, Any], out: Path, op: str) -> list[Path]:
    """JSON, picture and the Markdown page; the paths written."""
    from .plots import draw

    folder = out / results["machine"]["slug"]
    parts = [results["machine"]["date"].split()[0], *(["quick"] if results["quick"] else [])]
    stem = "-".join(parts if op == "all" else [*parts, *op.split(",")])
    folder.mkdir(parents=True, exist_ok=True)
    data, page, picture = (folder / f"{stem}.{kind}" for kind in ("json", "md", "png"))
    data.write_text(json.dumps(results, indent=1) + "\n")
    try:
        drawn = draw(results, picture)
    except ImportError:
        print("note: no plot without matplotlib: pip install matplotlib", file=sys.stderr)
        drawn = False
    page.write_text(markdown(results, picture.name if drawn else None))
    return [data, page, *([picture] if drawn else [])]


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    try:
        results = measured(chosen)
        if chosen.case is None and not chosen.no_files:
            for path in write(results, chosen.out, chosen.op):
                print(path, file=sys.stderr)
    except PykernelsError as error:
        if chosen.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if chosen.debug:
            raise
        print(f"error: unexpected {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED_CASES
    return EXIT_FAILED_CASES if any("why" in row for row in results["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
