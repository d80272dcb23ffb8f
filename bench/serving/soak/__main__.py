"""`python -m bench.serving.soak`: a server of the embedded model (or --model) under hard use.

Each run starts a server of its own, prints one line and ends with 1 where the server failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pykernels.errors import PykernelsError

from . import crowd, fuzz, killed, nodes, turns


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.soak", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--clients", type=int, metavar="N", help="at once, above what it takes")
    what.add_argument("--kill", type=int, metavar="N", help="times by SIGKILL while it answers")
    what.add_argument("--kill-nodes", type=int, metavar="N", help="each kind behind a router")
    what.add_argument("--fuzz", type=int, metavar="N", help="requests that make no sense")
    what.add_argument("--turns", action="store_true", help="of a conversation of 2K tokens")
    parser.add_argument("--minutes", type=float, default=10.0, help="of --clients (default 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the embedded one")
    parser.add_argument(
        "--way",
        choices=("transfer", "disk", "store"),
        default="transfer",
        help="of --kill-nodes: by which pages go from node to node (default transfer)",
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=("decode", "prefill", "router", "master"),
        help="of --kill-nodes: kill these alone; may be repeated",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="of --kill-nodes: JSON")
    options = parser.parse_args(arguments)
    model = [] if options.model is None else ["--model", str(options.model)]
    try:
        if options.clients is not None:
            told, good = crowd.run(options.clients, options.minutes, options.seed, model)
        elif options.kill is not None:
            told, good = killed.run(options.kill, options.seed, model)
        elif options.kill_nodes is not None:
            kinds = options.kind or nodes.kinds_of(options.way)
            asked = options.kill_nodes, options.way, kinds, options.seed
            told, good = nodes.run(*asked, model, options.save)
        elif options.fuzz is not None:
            told, good = fuzz.run(options.fuzz, options.seed, model)
        else:
            told, good = turns.run(options.seed, model)
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'ok' if good else 'FAILED'}: {told}")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
