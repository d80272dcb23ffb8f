"""python -m bench.soak: thousands of steps of which each half is late at random, and every token is
checked.

The experts of each step are on the CPU, all else on a GPU or on the ref device, and the two meet at
flags. The CPU spins for a random time when it has found a flag, the other device is late too, now
and then a job fails, or a step's time is up at once: then the requests of that step fail, and no
other. Requests come, end and are cancelled meanwhile. At last the workers are ended while requests
run. Every token must be the one that the CPU alone writes greedily, none may be lost or come twice,
no page of the cache may be lost, and nothing may hang. One JSON object says what happened.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import model
from bench.harness.keeping.provenance import provenance
from model.llm import LLM
from pykernels.errors import PykernelsError
from runtime.devices.gpus import check_device
from runtime.engine import Engine
from runtime.kv_cache.layout import PAGE
from runtime.planning.option import check_whole
from runtime.runner.paged_runner import PagedRunner
from runtime.workers.pool import WorkerPool

from .check import AT_ONCE, Counts, Wrong, answers, end, soak
from .delays import Delays
from .on_ref import on_ref

LONGEST = 90
"""Tokens of the longest prompt."""


def run(chosen: argparse.Namespace) -> Counts:
    """The whole soak. Raises PykernelsError for what is wrong, ``Wrong`` for a bug."""
    for name in ("steps", "tokens", "most_us", "late_in"):
        check_whole(name, getattr(chosen, name), 1, 1 << 30)
    if chosen.device != "ref":
        check_device(chosen.device)
    tokens, pages = 64, 2 * AT_ONCE  # too few pages for all: some wait, or are preempted
    settings: dict[str, Any] = {
        "device": "cpu",
        "defer": chosen.defer,
        "threads": chosen.threads,
        "max_model_len": 256,
        "max_num_seqs": AT_ONCE,
        "max_num_batched_tokens": tokens,
        "kv_tokens": pages * PAGE,
    }
    folder, counts = chosen.model or model.EMBEDDED, Counts()
    with ExitStack() as stack:
        llm = stack.enter_context(model.load_engine(folder, **settings))
        engine: Engine
        runner: PagedRunner
        pool: WorkerPool
        if chosen.device == "ref":
            engine, runner, pool = on_ref(llm, tokens, AT_ONCE)
            stack.enter_context(engine)
        else:
            settings |= {"device": chosen.device, "experts": "cpu"}
            settings |= {"gpu_experts": chosen.gpu_experts, "dual_batch": chosen.dual_batch}
            other = stack.enter_context(model.load_engine(folder, **settings))
            engine, runner, pool = other.engine, other.runner, other.pool
        prompts = own_text(llm, 24, chosen.seed)
        expected = answers(llm.engine, engine, prompts, chosen.tokens)
        delays = Delays(pool, chosen.seed, chosen.most_us, chosen.late_in, 12 * chosen.late_in)
        delays.add(runner)
        start = time.perf_counter()
        soak(engine, runner.num_pages, expected, chosen.steps, chosen.seed, counts)
        end(engine, pool, expected, counts)
        counts.late, counts.seconds = delays.late, round(time.perf_counter() - start, 2)
    return counts


def own_text(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Prompts from this file, of 4 to ``LONGEST`` tokens; the longer ones have a page that is found
    again."""
    text, random_ = Path(__file__).read_text(), random.Random(seed)
    starts = [random_.randrange(len(text) // 2) for _ in range(count)]
    sizes = [random_.choice((4, 17, 40, 70, LONGEST)) for _ in starts]
    return [
        llm.encode(text[start : start + 1000])[:size]
        for start, size in zip(starts, sizes, strict=True)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints what happened."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda:0", metavar="cuda:N|ref", help="default: cuda:0")
    add("--model", type=Path, metavar="DIR", help="default: the embedded model")
    add("--steps", type=int, default=10_000, metavar="N", help="default: 10000")
    add("--tokens", type=int, default=48, metavar="N", help="of an answer at most (default: 48)")
    add("--most-us", type=int, default=2000, metavar="N", help="longest delay (default: 2000)")
    add("--late-in", type=int, default=300, metavar="N", help="a late step in so many")
    add("--defer", default="off", metavar="N|off", help="experts deferred (default: off)")
    add("--gpu-experts", metavar="N", help="experts of each layer that the GPU has too")
    add("--dual-batch", action="store_true", help="decode steps in two microbatches")
    add("--threads", type=int, metavar="N", help="default: every core")
    add("--seed", type=int, default=1, metavar="N", help="default: 1")
    add("--hangs", type=float, default=600, metavar="S", help="seconds after which it hangs")
    chosen = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(chosen.hangs, exit=True)
    try:
        counts = run(chosen)
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, Wrong) else 2
    finally:
        faulthandler.cancel_dump_traceback_later()
    row = {"device": chosen.device, "seed": chosen.seed, **asdict(counts)}
    print(json.dumps(provenance() | row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
