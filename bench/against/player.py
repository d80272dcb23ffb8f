"""Times the expert kernel of the source tree that ``PYTHONPATH`` names, whenever it is told to.

It is started by its path, in the tree of today and in an older one, so it uses only what both have.
A line of JSON in is the case, then each is how many seconds to call it; a line out is what the
calls took. In the tree of today it first compares with the reference, if the case says so.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Plays until its input ends."""
    case, answer = json.loads(sys.stdin.readline()), sys.stdout
    sys.stdout = sys.stderr  # for what a kernel prints
    from pykernels.errors import PykernelsError
    from pykernels.shapes import MoEShape
    from runtime.profiling.measure import MoECase
    from runtime.workers.pool import make_pool

    def tell(**what: object) -> None:
        print(json.dumps(what), file=answer, flush=True)

    try:
        if case["check"]:
            from bench.against.check import check_moe

            tell(**vars(check_moe(case["fmt"], case["kernel"], case["activations"])))
        with make_pool(case["threads"], numa=case["numa"]) as pool:
            calls = MoECase(
                case["fmt"],
                case["tokens"],
                MoEShape(**case["shape"]),
                pool,
                case["kernel"],
                case["routing"],
                case["activations"],
            )
            calls.call()  # compiles
            tell(
                threads=pool.threads,
                kernel=calls.layers[0].backend.name,
                flops=calls.flops,
            )
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
