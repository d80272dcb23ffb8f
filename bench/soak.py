"""python -m bench.soak: thousands of steps of which each half is late at random, and every token is
checked.

The experts of each step are on the CPU, all else on a GPU or on the ref device, and the two meet at
flags. The CPU spins for a random time when it has found a flag, the other device is late too, now
and then a job fails, or a step's time is up at once: then the requests of that step fail, and no
other. Requests come, end and are cancelled meanwhile. At last
the workers are ended while requests run. Every token must be the one that the CPU alone writes
greedily, none may be lost or come twice, no page of the cache may be lost, and nothing may hang.
One JSON object says what happened.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import model
from model.llm import LLM
from pykernels.cpu.intrin.sync import atomic_load, atomic_store, clock_ns, pause
from pykernels.cpu.jit import task
from pykernels.errors import PykernelsError
from runtime.devices.cuda.executable import CudaExecutable
from runtime.devices.ref.runner import RefRunner
from runtime.devices.ref.step import RefExecutable
from runtime.devices.runner import PagedRunner, Pass
from runtime.engine import Engine, RequestHandle, SamplingParams
from runtime.engine.batch import DeviceLost
from runtime.passes import defer as defer_pass
from runtime.passes import offload
from runtime.program import Program
from runtime.workers.pool import TaskError, WorkerPool

SURE = 0.3
"""By how much the likeliest token's logprob must be ahead: what is closer, rounding may decide."""
FAILED = -7
"""Status of a task that fails on purpose."""
STATE, MOST_NS, FAILS_IN = range(3)
LONG_IN = 16
AT_ONCE = 8
"""Requests that run at once."""
LONGEST = 90
"""Tokens of the longest prompt."""
"""One delay in so many is up to the longest, the others up to a sixteenth of it."""


class Wrong(PykernelsError):
    """What may not happen has happened."""


@task("soak-delay")
def delay(record, index, worker):  # type: ignore[no-untyped-def]
    """Spins for a random time, and then has no tasks, or fails; int64 [STATE, MOST_NS,
    FAILS_IN]."""
    state = atomic_load(record) * 6364136223846793005 + 1442695040888963407
    atomic_store(record, state)
    drawn = (state >> 33) & 0x3FFFFFFF
    most = atomic_load(record + 8 * MOST_NS)
    if drawn % LONG_IN != 0:
        most //= LONG_IN
    end = clock_ns() + (drawn // LONG_IN) % (most + 1)
    while clock_ns() < end:
        pause()
    fails = atomic_load(record + 8 * FAILS_IN)
    return FAILED if fails > 0 and (drawn // 64) % fails == 0 else 0


@dataclass(frozen=True)
class Answer:
    """A prompt, and the tokens that follow it for sure."""

    prompt: list[int]
    tokens: tuple[int, ...]


@dataclass
class Counts:
    """What happened.

    Attributes:
        requests: that were submitted: ``answered`` in full, or ``cancelled`` or ``failed`` with the
            first of their tokens; ``tokens`` of all.
        steps: of the engine, of which ``failed_steps`` failed.
        late: steps whose time was up at once.
        ended: requests that had an error since the workers had ended.
    """

    requests: int = 0
    answered: int = 0
    cancelled: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    late: int = 0
    ended: int = 0
    seconds: float = 0.0


def answers(
    llm: LLM, engine: Engine, prompts: Sequence[list[int]], tokens: int, sure: float = SURE
) -> list[Answer]:
    """What an engine of the CPU writes greedily, up to the first token that is not sure.

    A token is sure if it is far ahead of the second one on both engines, alone and undisturbed: the
    least rounding may let a router choose other experts, and from there on both are right.

    Args:
        sure: how far, in logprobs.

    Raises:
        Wrong: the engines differ too often for that.
    """
    found, alone, both = [], 0, 0
    for prompt in prompts:  # each alone: with deferral it depends on what is beside it
        first, second = (_sure(one, prompt, tokens, sure) for one in (llm.engine, engine))
        shared = 0
        for ours, theirs in zip(first, second, strict=False):
            if ours != theirs:
                break
            shared += 1
        alone, both = alone + len(first), both + shared
        if shared:
            found.append(Answer(prompt, first[:shared]))
    if both < alone / 2 or len(found) < AT_ONCE:
        raise Wrong(f"both engines write only {both} of {alone} tokens alike", "A bug")
    return found


def _sure(engine: Engine, prompt: list[int], tokens: int, least: float) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2, ignore_eos=True)
    sure = []
    for token in engine.generate([prompt], params)[0].completions[0].logprobs:
        (_, first), (_, second) = token.top[:2]
        if first - second < least:
            break
        sure.append(token.token)
    return tuple(sure)


class Delays:
    """Makes a runner's steps late.

    Args:
        most_us: of one delay; the CPU has one a layer, few of them long.
        late_in: one step in so many has no time at all; ``fails_in``: one delay in so many fails.

    Attributes:
        late: steps that had no time.
    """

    def __init__(
        self, pool: WorkerPool, seed: int, most_us: int, late_in: int, fails_in: int
    ) -> None:
        self.pool, self.most_us, self.late_in, self.late = pool, most_us, late_in, 0
        self._random = random.Random(seed)
        self._record = np.array([seed, most_us * 1000, fails_in], np.int64)

    def add(self, runner: PagedRunner) -> None:
        """Those of all programs that have a half on the CPU."""
        for step in {id(step): step for step in (*runner.steps, *runner.decode_steps)}.values():
            if not isinstance(step, RefExecutable | CudaExecutable) or step.cpu is None:
                continue
            for job in step.cpu.jobs.jobs:
                if job.opens:  # it stands for a flag, and has no task of its own
                    job.set_task(0, delay.address, self._record.ctypes.data)
            step.before = self._before(step)
            if isinstance(step, RefExecutable) and step.link is not None:
                step.link.late = lambda: time.sleep(self._drawn_us() / 1e6)

    def _before(self, step: RefExecutable | CudaExecutable) -> Callable[[], None]:
        before = step.before

        def late() -> None:
            hit = self._random.randrange(self.late_in) == 0
            self.late += hit
            self.pool.limit_steps(0 if hit else 60)
            before()
            if isinstance(
                step, CudaExecutable
            ):  # the stream, behind the step's inputs; at 1 to 2 GHz
                with torch.cuda.device(step.device):
                    torch.cuda._sleep(1500 * self._drawn_us())

        return late

    def _drawn_us(self) -> int:
        most = self.most_us if self._random.randrange(LONG_IN) == 0 else self.most_us // LONG_IN
        return self._random.randint(0, most)


def soak(
    engine: Engine, pages: int, found: Sequence[Answer], steps: int, seed: int, counts: Counts
) -> None:
    """Asks for answers until an engine has done so many steps more; checks each.

    Of an engine with a thread new ones are asked for while others are answered; of one without,
    when all are, and no prompt twice, so that none is read beside a decode.

    Args:
        pages: of the engine's cache.

    Raises:
        Wrong: another token, too few or too many of them, or a lost page.
    """
    random_, asked = random.Random(seed), deque[tuple[RequestHandle, tuple[int, ...]]]()
    last = engine.stats.steps + steps
    while engine.stats.steps < last or asked:
        more = AT_ONCE - len(asked) if engine.threaded or not asked else 0
        for answer in random_.sample(found, more if engine.stats.steps < last else 0):
            tokens = answer.tokens[: random_.randint(1, len(answer.tokens))]
            asked.append((engine.submit(answer.prompt, _greedy(len(tokens))), tokens))
            counts.requests += 1
        if random_.random() < 0.1:
            random_.choice(asked)[0].cancel()
        _check(*asked.popleft(), counts)
    stats = engine.stats
    counts.steps, counts.failed_steps = stats.steps, stats.failed_steps
    if stats.free_pages + stats.cached_pages != pages:
        raise Wrong(f"of {pages} pages {stats.free_pages + stats.cached_pages} are left", "A bug")


def end(engine: Engine, pool: WorkerPool, found: Sequence[Answer], counts: Counts) -> None:
    """Ends the workers while requests run: those that are not answered get the error.

    Raises:
        Wrong: the engine still takes requests, or gave a wrong token.
    """
    asked = found[:AT_ONCE]
    handles = [(engine.submit(a.prompt, _greedy(len(a.tokens))), a.tokens) for a in asked]
    next(handles[0][0])
    pool.close()
    before = counts.ended
    for handle, tokens in handles[1:]:
        _check(handle, tokens, counts)
    try:  # if all were answered, the engine finds out now
        _check(engine.submit(found[0].prompt, _greedy(1)), found[0].tokens[:1], counts)
    except PykernelsError as error:
        if "engine has failed" not in error.cause and "closed" not in error.cause:
            raise
    if engine.healthy or counts.ended == before:
        raise Wrong("the engine goes on without its workers", "A bug")


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _check(handle: RequestHandle, wanted: tuple[int, ...], counts: Counts) -> None:
    """Takes a request's tokens to its end."""
    tokens: list[int] = []
    reason = None
    try:
        for chunk in handle:
            tokens += chunk.token_ids
            reason = chunk.finish_reason
    except PykernelsError as error:
        cause = error.__cause__
        if isinstance(cause, TaskError):
            counts.failed += 1
        elif isinstance(cause, DeviceLost) or "pool is closed" in str(cause):
            counts.ended += 1
        else:
            raise
    counts.tokens += len(tokens)
    counts.cancelled += reason == "cancelled"
    counts.answered += reason == "length"
    whole = reason != "length" or len(tokens) == len(wanted)
    if tuple(tokens) != wanted[: len(tokens)] or not whole:
        raise Wrong(f"{tokens} came where {list(wanted)} was to come ({reason})", "A bug")


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


def run(chosen: argparse.Namespace) -> Counts:
    """The whole soak. Raises PykernelsError for what is wrong, ``Wrong`` for a bug."""
    sizes = {"max_model_len": 256, "max_num_seqs": AT_ONCE, "max_num_batched_tokens": 64}
    if chosen.defer != "off":  # what decode steps alone do: all prompts are read before, in a step
        sizes |= {"max_num_batched_tokens": AT_ONCE * LONGEST, "kv_tokens": AT_ONCE * 256}
    settings: dict[str, Any] = {"defer": chosen.defer, "threads": chosen.threads, **sizes}
    folder, counts, start = chosen.model or model.EMBEDDED, Counts(), time.perf_counter()
    with ExitStack() as stack:
        llm = stack.enter_context(model.load_engine(folder, **settings))
        if chosen.device == "ref":
            engine, runner, pool = on_ref(llm, sizes, chosen.defer)
            stack.enter_context(engine)
        else:
            settings |= {"device": chosen.device, "experts": "cpu"}
            settings |= {"gpu_experts": chosen.gpu_experts, "dual_batch": chosen.dual_batch}
            other = stack.enter_context(model.load_engine(folder, **settings))
            engine, runner, pool = other.engine, other.runner, other.pool
            engine.threaded = chosen.defer == "off"
        found = answers(llm, engine, own_text(llm, 24, chosen.seed), chosen.tokens)
        delays = Delays(pool, chosen.seed, chosen.most_us, chosen.late_in, 12 * chosen.late_in)
        delays.add(runner)
        start = time.perf_counter()
        soak(engine, runner.num_pages, found, chosen.steps, chosen.seed, counts)
        end(engine, pool, found, counts)
        counts.late, counts.seconds = delays.late, round(time.perf_counter() - start, 2)
    return counts


class OnRef(RefRunner):
    """On the ref device, but for routed experts: those are on the CPU in every step."""

    def lowered(self, *sizes: int) -> Program:
        return offload(super().lowered(*sizes))


def on_ref(llm: LLM, sizes: dict[str, int], defer: str) -> tuple[Engine, OnRef, WorkerPool]:
    """An engine over a loaded model and its workers, which run the experts."""
    passes: list[Pass] = [partial(defer_pass, N=int(defer))] if defer.isdecimal() else []
    pages = None if defer == "off" else llm.runner.num_pages
    given = {name: size for name, size in sizes.items() if name != "kv_tokens"}
    runner = OnRef(llm.runner.model, **given, num_pages=pages, passes=passes, pool=llm.pool)
    return Engine(runner, threaded=defer == "off"), runner, llm.pool


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
    add("--dual-batch", action="store_true", help="decode steps in two lanes")
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
    print(json.dumps({"device": chosen.device, "seed": chosen.seed, **asdict(counts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
