"""python -m bench.report FILE.json: the table, page and plots of results again, partial ones too.

Results of `pykernels bench prefill|contexts|drafts|cache|mixed|load|dslp|disagg|tensor` (--save or
--json) are printed as tables, drawn with --plot, and written as a page with --page. Of those of
bench.cpu, gpu, e2e and ablation the page and the plots are written beside the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.harness.files import again
from bench.harness.keeping.kept import TABLES, tell
from bench.harness.keeping.page import write_page
from bench.harness.session import exit_code
from pykernels.errors import PykernelsError


def report(file: Path, plot: Path | None, page: Path | None = None) -> int:
    """Shows the results in a file; the exit code.

    Raises:
        PykernelsError: it has none that this can show.
    """
    hint = "Give it the JSON file of a benchmark"
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PykernelsError(f"{file} cannot be read: {error}", hint) from None
    if not isinstance(results, dict) or not {"rows", "complete"} <= results.keys():
        raise PykernelsError(f"{file} has no rows, or does not say if it is complete", hint)
    if results.get("bench") in TABLES and page is not None:
        for path in write_page(results, page):
            print(path)
    elif results.get("bench") in TABLES:
        tell(results, False, plot)
    elif "headline" in results:
        for path in again(results, file):
            print(path)
    else:
        raise PykernelsError(f"{file} is of no benchmark with a table", hint)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="of prefill, cache and others"
    )
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="with its plot beside it")
    chosen = parser.parse_args(arguments)
    return exit_code(lambda: report(chosen.file, chosen.plot, chosen.page))


if __name__ == "__main__":
    sys.exit(main())
