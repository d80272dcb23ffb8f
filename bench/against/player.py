"""Times a kernel of the source tree that ``PYTHONPATH`` names first, whenever it is told to.

It is started by its path, in the tree of today and in an older one (``calls``). A line of JSON in
is the case, then each is how many seconds to call it; a line out is what the calls took. In the
tree of today it first compares with the reference, if the case says so.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Plays until its input ends."""
    case, answer = json.loads(sys.stdin.readline()), sys.stdout
    sys.stdout = sys.stderr  # for what a kernel prints
    from bench.against.calls import playing
    from pykernels.errors import PykernelsError

    def tell(**what: object) -> None:
        print(json.dumps(what), file=answer, flush=True)

    try:
        if case["check"]:
            from bench.against.check import check

            tell(**vars(check(case)))
        with playing(case) as (calls, kernel, threads):
            calls.call()  # compiles
            tell(threads=threads, kernel=kernel, flops=calls.flops)
            for line in sys.stdin:
                end = time.perf_counter() + float(line)
                timed: list[tuple[float, int]] = []
                while time.perf_counter() < end or not timed:
                    timed.append(calls.call())
                tell(calls=timed)
    except PykernelsError as error:
        tell(refused=[error.cause, error.hint])


if __name__ == "__main__":
    main()
