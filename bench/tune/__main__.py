"""python -m bench.tune: times candidate launch plans on this GPU and writes the best ones.

They go to ``<cache folder>/gpu-plans.json``, which ``pykernels.gpu.plans.tuned`` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from bench.harness.keeping.provenance import provenance
from bench.harness.machine import check_gpu
from bench.harness.session import exit_code
from pykernels.errors import PykernelsError
from pykernels.gpu.plans.attention_lines import OPS as ATTENTION

from . import attention, products
from .job import Job
from .search import tune

OPS = ",".join((*products.OPS, *ATTENTION))
FORMATS = ",".join(products.FORMATS)


def asked(op: str, format: str, rows: str, sizes: Sequence[str] = ()) -> list[Job]:
    """The jobs that the options name; ``rows`` "" for any, ``sizes`` none for the usual ones.

    Raises:
        PykernelsError: a name, a size or a number of rows that nothing is tuned for.
    """
    for given, known, what in ((op, OPS, "op"), (format, FORMATS, "format")):
        if unknown := [name for name in given.split(",") if name not in known.split(",")]:
            raise PykernelsError(
                f"nothing is tuned for the {what} {unknown[0]!r}", f"Use {known}, or some of them"
            )
    ops, formats = set(op.split(",")), set(format.split(","))
    of_products = list(products.jobs(ops, formats))
    jobs: list[Job] = [*of_products, *attention.jobs(ops, formats)]
    if rows:
        names = set(rows.split(","))
        known_rows = sorted({job.rows for job in of_products})
        if unknown := sorted(names - set(map(str, known_rows))):
            raise PykernelsError(
                f"nothing is tuned for {unknown[0]!r} rows",
                f"Use some of {', '.join(map(str, known_rows))}"
                if of_products
                else "Leave them out",
            )
        jobs = [job for job in of_products if str(job.rows) in names]
    if sizes:
        jobs = list(attention.jobs(ops, formats, sizes))
    if not jobs:
        raise PykernelsError(
            f"no {op} is tuned in {format}" + (f" at {' or '.join(sizes)}" if sizes else ""),
            "Ask for more ops or formats; --size is of attention alone",
        )
    return jobs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--op", default=OPS, metavar="A,B", help=f"of {OPS}")
    parser.add_argument(
        "--format", default=FORMATS, metavar="A,B", help="of the weights, or of attention's cache"
    )
    parser.add_argument("--rows", default="", metavar="M,N", help="only products of so many rows")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="batch=8,context=4096",
        help="only attention, of this size: batch, context, heads, kv_heads, head_dim, format, "
        "window, new (tokens); some are of some --op only; may be given again; caches have pages "
        "of 64",
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--no-save", action="store_true", help="only print")
    chosen = parser.parse_args(arguments)
    wanted = asked(chosen.op, chosen.format, chosen.rows, chosen.size)
    if not torch.cuda.is_available():
        raise PykernelsError("there is no CUDA GPU here", "Run it on the GPU that is to be tuned")
    for row in tune(wanted, check_gpu(chosen.device), not chosen.no_save):
        print(json.dumps(provenance() | row), flush=True)
    return 0


if __name__ == "__main__":  # plans found before Ctrl-C are written
    sys.exit(exit_code(main))
