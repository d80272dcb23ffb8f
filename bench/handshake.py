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
from pykernels.cpu.intrin.sync import atomic_load, atomic_store, pause
from pykernels.errors import PykernelsError
from pykernels.gpu.common.stream_memory import supports, wait_value, write_value
from pykernels.gpu.handshake import combine, copy_rows

ENGINE = torch.float32, torch.int64, torch.float32
"""How the engine stores rows, experts and weights: as the CPU's kernels read them."""
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
            ids=torch.zeros(T, topk, dtype=torch.int32, device="cuda"),
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
        combine(self.residual, self.addends, self.weight, 1e-6, self.out)


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

    def time(self, body: Callable[[int], None], asks: bool) -> dict[str, float]:
        """Microseconds a hop of a graph that calls ``body`` for each of its hops."""
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
            times.append((time.perf_counter() - start) / self.hops * 1e6)
        done.set()
        if asks:
            poller.join(TIME_LIMIT_S)
            watchdog.join(TIME_LIMIT_S)
        if late:
            raise PykernelsError(
                "the CPU did not answer in time", "Keep a core free, and try again"
            )
        times = times[self.replays // 10 :]
        return {
            "us_per_hop": round(statistics.median(times), 2),
            "min": round(min(times), 2),
            "p90": round(float(np.percentile(times, 90)), 2),
        }

    def _watch(self, done: threading.Event, late: list[bool]) -> None:
        if done.wait(TIME_LIMIT_S):
            return
        late.append(True)
        self.flags[16] = 1
        while not done.is_set():  # whatever hop waits
            for hop in range(self.hops):
                self.flags[8] = hop + 1
                time.sleep(1e-4)


def cases(hops: Hops, H: int, topk: int) -> dict[str, tuple[Callable[[int], None], bool]]:
    """What each graph does in a hop, and whether it asks the CPU."""
    layers = {T: Layer.make(T, H, topk, 3, pinned=True) for T in (1, 4, 16)}
    engine = {T: Layer.make(T, H, topk, 3, pinned=True, stored=ENGINE) for T in (1, 4, 16)}
    near = Layer.make(1, H, topk, 3, pinned=False)
    one = layers[1]
    for layer in (*layers.values(), *engine.values(), near):  # compiles
        layer.submit()
        layer.load()
        layer.combine()
    torch.cuda.synchronize()

    def stored_and_loaded(layer: Layer) -> Callable[[int], None]:
        def body(hop: int) -> None:
            layer.submit()
            hops.ask(hop)
            layer.load()

        return body

    def hop_of(layer: Layer) -> Callable[[int], None]:
        def body(hop: int) -> None:
            layer.submit()
            hops.ask(hop)
            layer.combine()

        return body

    def kernels(layer: Layer) -> Callable[[int], None]:
        def body(hop: int) -> None:
            layer.submit()
            layer.combine()

        return body

    def load_alone(hop: int) -> None:
        hops.ask(hop)
        one.load()

    def submit_alone(hop: int) -> None:
        one.submit()
        hops.ask(hop)

    def combine_alone(hop: int) -> None:
        hops.ask(hop)
        one.combine()

    return {
        "flags alone": (hops.ask, True),
        "submit, flags": (submit_alone, True),
        "flags, load": (load_alone, True),
        "flags, combine": (combine_alone, True),
        **{
            f"submit, flags, load, rows {T}": (stored_and_loaded(x), True)
            for T, x in engine.items()
        },
        "submit of bfloat16, flags, load, rows 1": (stored_and_loaded(one), True),
        "kernels on the GPU's memory, flags": (hop_of(near), True),
        **{f"submit, flags, combine, rows {T}": (hop_of(x), True) for T, x in layers.items()},
        "kernels on pinned memory, no flags": (kernels(one), False),
        "kernels on the GPU's memory, no flags": (kernels(near), False),
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
        for name, (body, asks) in cases(hops, chosen.hidden, chosen.topk).items():
            print(json.dumps(head | {"case": name} | hops.time(body, asks)), flush=True)
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
