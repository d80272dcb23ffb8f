"""python -m bench.handshake: what a hop to the CPU and back costs in a captured graph.

One JSON object a line: microseconds a hop, for one row or several, of a graph of 60 hops. A thread
polls the flags and answers at once, without experts. "submit, flags, load" is what the engine has
for each layer of experts on the CPU: rows and their routing stored, both flags, the sums loaded.
"combine" loads them within the next norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, types

from bench.harness.keeping.provenance import provenance
from pykernels import ref
from pykernels.cpu.intrin.sync import atomic_load, atomic_store, pause
from pykernels.errors import PykernelsError
from pykernels.gpu.common.stream_memory import supports, wait_value, write_value
from pykernels.gpu.handshake import combine, copy_rows
from pykernels.testing import relative_error

ENGINE = torch.float32, torch.int64, torch.float32
"""How the engine stores rows, experts and weights: as the CPU's kernels read them."""
EPS = 1e-6
TIME_LIMIT_S = 20.0
"""The time limit of one measurement: then the watchdog answers, and the measurement is an error."""


@njit(nogil=True)
def _answer(asked: int, answered: int, hops: int, replays: int, stop: int) -> None:
    """Answers each hop in turn until all are answered, or ``stop`` is not 0."""
    for _ in range(replays):
        for hop in range(1, hops + 1):
            while atomic_load(asked) != hop:
                if atomic_load(stop) != 0:
                    return
                pause()
            atomic_store(answered, types.int64(hop))


@dataclass(frozen=True)
class Layer:
    """Buffers of a hop: activations on the GPU, places in pinned memory, results."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    residual: torch.Tensor
    addends: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    out: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(
        cls,
        T: int,
        H: int,
        topk: int,
        addends: int,
        pinned: bool,
        stored: Sequence[torch.dtype] = (torch.bfloat16, torch.int32, torch.float32),
    ) -> Layer:
        """``addends``: one on the GPU (shared experts), the others from the host, if ``pinned``.
        ``stored``: what the host gets of the rows, the experts and their weights."""

        def host(n: int, dtype: torch.dtype) -> torch.Tensor:
            x = torch.zeros(T, n, dtype=dtype)
            return x.pin_memory() if pinned else x.cuda()

        def device(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(T, n, device="cuda").to(dtype)

        return cls(
            x=device(H),
            ids=torch.arange(T * topk, dtype=torch.int32, device="cuda").view(T, topk),
            weights=device(topk, torch.float32),
            places=(host(H, stored[0]), host(topk, stored[1]), host(topk, stored[2])),
            residual=device(H, torch.float32),
            addends=(device(H), *(host(H, torch.float32) for _ in range(addends - 1))),
            weight=device(H)[0].contiguous(),
            out=(device(H), device(H, torch.float32)),
        )

    def submit(self) -> None:
        copy_rows((self.x, self.ids, self.weights), self.places)

    def load(self) -> None:
        """The sums as a wait of the engine loads them: as they are."""
        copy_rows(self.addends[1:2], self.out[1:])

    def combine(self) -> None:
        combine(self.residual, self.addends, self.weight, EPS, self.out)

    def error(self) -> float:
        """The largest relative error of what is stored and summed beside ``pykernels.ref``."""
        self.submit()
        self.combine()
        torch.cuda.synchronize()
        expected = tuple(torch.empty_like(place) for place in self.places)
        ref.copy_rows((self.x, self.ids, self.weights), expected)
        truths = *expected, *ref.combine(self.residual, self.addends, self.weight, EPS)
        results = *self.places, *self.out
        return max(map(relative_error, results, truths))


class Hops:
    """Graphs of hops, and the thread that answers them."""

    def __init__(self, hops: int, replays: int) -> None:
        self.hops, self.replays = hops, replays
        self.flags = torch.zeros(24, dtype=torch.int64).pin_memory()
        base = self.flags.data_ptr()
        self.asked, self.answered, self.stop = base, base + 64, base + 128
        _answer(self.asked, self.answered, 0, 0, self.stop)  # compiles

    def ask(self, hop: int) -> None:
        write_value(self.asked, hop + 1)
        wait_value(self.answered, hop + 1)

    def time(self, body: Callable[[int], None], asks: bool) -> list[float]:
        """Seconds a hop of each replay of a graph that calls ``body`` for each of its hops.

        Raises:
            PykernelsError: the CPU did not answer within ``TIME_LIMIT_S``.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for hop in range(self.hops):
                body(hop)
        self.flags.zero_()
        counts = self.hops, self.replays, self.stop
        poller = threading.Thread(
            target=_answer, args=(self.asked, self.answered, *counts), daemon=True
        )
        done = threading.Event()
        late: list[bool] = []
        watchdog = threading.Thread(target=self._watch, args=(done, late), daemon=True)
        if asks:
            poller.start()
            watchdog.start()
        times = []
        for _ in range(self.replays):
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / self.hops)
        done.set()
        if asks:
            poller.join(TIME_LIMIT_S)
            watchdog.join(TIME_LIMIT_S)
        if late:
            raise PykernelsError(
                "the CPU did not answer in time", "Keep a core free, and try again"
            )
        return times[self.replays // 10 :]

    def _watch(self, done: threading.Event, late: list[bool]) -> None:
        if done.wait(TIME_LIMIT_S):
            return
        late.append(True)
        self.flags[16] = 1
        while not done.is_set():  # whatever hop waits
            for hop in range(self.hops):
                self.flags[8] = hop + 1
                time.sleep(1e-4)


@dataclass(frozen=True)
class Hop:
    """What a hop does, in this order: some of "submit", "flags", "load", "combine".

    Attributes:
        engine: the host gets rows and routing as the engine stores them, else rows of bfloat16.
        pinned: what the CPU would have is in its memory, else in the GPU's.
    """

    parts: tuple[str, ...]
    T: int = 1
    engine: bool = False
    pinned: bool = True

    @property
    def asks(self) -> bool:
        """Whether it waits for the CPU's answer."""
        return "flags" in self.parts

    def layer(self, H: int, topk: int) -> Layer:
        """Its buffers, with random rows."""
        stored: dict[str, Any] = {"stored": ENGINE} if self.engine else {}
        return Layer.make(self.T, H, topk, 3, self.pinned, **stored)

    def body(self, hops: Hops, layer: Layer) -> Callable[[int], None]:
        """What runs hop number n; its kernels are compiled."""
        kernels = {"submit": layer.submit, "load": layer.load, "combine": layer.combine}

        def body(hop: int) -> None:
            for part in self.parts:
                if part == "flags":
                    hops.ask(hop)
                else:
                    kernels[part]()

        for part in self.parts:
            if part != "flags":
                kernels[part]()
        torch.cuda.synchronize()
        return body


HOPS = {
    "flags alone": Hop(("flags",)),
    "submit, flags": Hop(("submit", "flags")),
    "flags, load": Hop(("flags", "load")),
    "flags, combine": Hop(("flags", "combine")),
    **{
        f"submit, flags, load, rows {T}": Hop(("submit", "flags", "load"), T, engine=True)
        for T in (1, 4, 16)
    },
    "submit of bfloat16, flags, load, rows 1": Hop(("submit", "flags", "load")),
    "kernels on the GPU's memory, flags": Hop(("submit", "flags", "combine"), pinned=False),
    **{
        f"submit, flags, combine, rows {T}": Hop(("submit", "flags", "combine"), T)
        for T in (1, 4, 16)
    },
    "kernels on pinned memory, no flags": Hop(("submit", "combine")),
    "kernels on the GPU's memory, no flags": Hop(("submit", "combine"), pinned=False),
}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Microseconds of the median hop, the fastest and the tenth slowest of a hundred."""
    us = [1e6 * each for each in seconds]
    return {
        "us_per_hop": round(statistics.median(us), 2),
        "min": round(min(us), 2),
        "p90": round(float(np.percentile(us, 90)), 2),
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(prog="python -m bench.handshake", description=__doc__)
    parser.add_argument("--hops", type=int, default=60)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    chosen = parser.parse_args(arguments)
    try:
        if not torch.cuda.is_available():
            raise PykernelsError("there is no CUDA GPU here", "Run it on a machine with one")
        if reason := supports():
            raise PykernelsError(reason, "Update the driver")
        if chosen.hops < 2 or chosen.replays < 1:
            raise PykernelsError("too few hops or replays", "Give 2 hops and 1 replay at least")
        hops = Hops(chosen.hops, chosen.replays)
        head: dict[str, Any] = provenance() | {
            "gpu": torch.cuda.get_device_name(),
            "hidden": chosen.hidden,
        }
        for name, hop in HOPS.items():
            body = hop.body(hops, hop.layer(chosen.hidden, chosen.topk))
            seconds = hops.time(body, hop.asks)
            print(json.dumps(head | {"case": name} | summary(seconds)), flush=True)
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
