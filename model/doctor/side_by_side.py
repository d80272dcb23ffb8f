"""Kernels tried in processes of their own: compiling holds Python's lock.

Each process has one core. One that a kernel ends takes no other with it: that is a fact, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import TextIO

from runtime.machine.topology import Topology

from .report import Fact

Case = tuple[str, str]
"""A weight format and a kernel."""
MEMORY = 1 << 30
"""Bytes that a process takes while it compiles, with room."""


def tried_side_by_side(
    cases: Sequence[Case], progress: Callable[[str], None]
) -> Iterator[tuple[Case, Fact]]:
    """Each case with its fact, as soon as it is known.

    Args:
        progress: called with the cases that are under way.
    """
    topology = Topology.detect()
    most = min(topology.usable, topology.memory_available // MEMORY, len(cases))
    todo: SimpleQueue[Case] = SimpleQueue()
    results: SimpleQueue[tuple[Case, Fact | None]] = SimpleQueue()
    for case in cases:
        todo.put(case)
    cores = topology.cores[: max(1, most)]
    threads = [
        threading.Thread(target=_work, args=(core, todo, results), daemon=True) for core in cores
    ]
    for thread in threads if cases else ():
        thread.start()
    running: list[Case] = []
    left = len(cases)
    while left:
        case, fact = results.get()
        if fact is None:
            running.append(case)
        else:
            running.remove(case)
            left -= 1
            yield case, fact
        names = ", ".join(fmt for fmt, _ in running)
        progress(f"{left} to go, compiling {names}")


def _work(
    core: int, todo: SimpleQueue[Case], results: SimpleQueue[tuple[Case, Fact | None]]
) -> None:
    """Has a process on one core try cases, one after the other."""
    process: subprocess.Popen[str] | None = None
    while True:
        try:
            fmt, kernel = case = todo.get_nowait()
        except Empty:
            break
        results.put((case, None))
        process = process or _start(core)
        assert process.stdin is not None and process.stdout is not None
        line = ""
        try:
            print(json.dumps(case), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except OSError:
            pass  # it has ended
        if line:
            results.put((case, Fact(**json.loads(line))))
            continue
        name, code = f"{fmt} on {kernel}", process.wait()
        cause = (
            f"{name}: its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
        )
        hint = "Use --kernel generic and report this CPU"
        results.put((case, Fact(name, "failed", cause, hint)))
        process = None
    if process is not None and process.stdin is not None:
        process.stdin.close()  # which ends it
        process.wait()


def _start(core: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYKERNELS_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


def main(core: int, cases: TextIO, facts: TextIO) -> None:
    """Tries the cases that it reads, one a line, and writes their facts."""
    os.sched_setaffinity(0, {core})
    from .result import result_fact

    for line in cases:
        print(json.dumps(asdict(result_fact(*json.loads(line)))), file=facts, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin, sys.stdout)
