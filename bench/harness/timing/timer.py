"""Clocks: replays of a CUDA graph of many calls, or a plain loop on a CPU (for the tests)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pykernels.errors import PykernelsError

L2_SHARE = 3
"""Rotating inputs are together this many times the L2."""
_REPLAY = 2e-3  # seconds of one replay, wanted: event timers tick at 0.5 us
_MOST_CALLS = 512
_LEAST_ROUNDS = 5


@dataclass
class Ready:
    """A call, warmed up and captured; calling this gives seconds a call.

    Attributes:
        replay: runs ``calls`` calls and returns the seconds they took together.
        captured: whether they are one CUDA graph.
        rounds: replays that fill the time asked for.
    """

    replay: Callable[[], float]
    calls: int
    captured: bool
    rounds: int

    def __call__(self) -> float:
        return self.replay() / self.calls

    def turn(self, seconds: float = 0.0, most: int = 1000) -> list[tuple[int, float]]:
        """One replay, whatever ``seconds``: its median call."""
        return [(0, self())]


class Timer(Protocol):
    """How calls are timed on one kind of device."""

    def prepare(self, call: Callable[[], object], sets: int, seconds: float) -> Ready: ...

    def check(self) -> None:
        """Raises `PykernelsError` if nothing more can run in this process."""
        ...


def make_timer(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache; of a CPU a made-up small one, for the tests."""
    if device.type != "cuda":
        return 1 << 16
    return torch.cuda.get_device_properties(device).L2_cache_size


def _calls(once: float, sets: int) -> int:
    """Calls a replay, whole rotations."""
    calls = min(_MOST_CALLS, max(1, round(_REPLAY / max(once, 1e-7))))
    return -(-calls // sets) * sets


def _rounds(replay: float, seconds: float) -> int:
    return max(_LEAST_ROUNDS, min(2000, round(seconds / max(replay, 1e-7))))


class CudaTimer:
    """Events around graph replays; around eager calls for a peer that cannot be captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def prepare(self, call: Callable[[], object], sets: int, seconds: float) -> Ready:
        for _ in range(2 * min(sets, 3)):  # compiles, fills workspaces
            call()
        torch.cuda.synchronize(self.device)
        calls = _calls(self._elapsed(call, 4) / 4, sets)  # launches included: an upper bound
        if not self._waits(call):
            graph = torch.cuda.CUDAGraph()
            try:
                self._capture(graph, call, calls)
                return self._ready(lambda: self._elapsed(graph.replay), calls, True, seconds)
            except RuntimeError:
                self.check()
                self._leave_capture()
        return self._ready(lambda: self._elapsed(call, calls), calls, False, seconds)

    def _waits(self, call: Callable[[], object]) -> bool:
        """Whether torch waits for the device in it: found before a capture fails by it."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # that this mode does not see every synchronization
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False

    def _ready(
        self, replay: Callable[[], float], calls: int, captured: bool, seconds: float
    ) -> Ready:
        replay()
        return Ready(replay, calls, captured, _rounds(replay(), seconds))

    def _capture(self, graph: torch.cuda.CUDAGraph, call: Callable[[], object], calls: int) -> None:
        """Without torch.cuda.graph's garbage collections, which cost more than the timing."""
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(calls):
                    call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize(self.device)

    def _leave_capture(self) -> None:
        """A failed capture leaves torch's generator waiting for its end: a new state ends it."""
        generator = torch.cuda.default_generators[self.device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())

    def _elapsed(self, run: Callable[[], object], times: int = 1) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except Exception as error:
            raise PykernelsError(
                f"the GPU's context is lost ({str(error).splitlines()[0]})",
                "Run the remaining cases in a new process",
            ) from None


class HostTimer:
    """A loop and a clock."""

    def prepare(self, call: Callable[[], object], sets: int, seconds: float) -> Ready:
        call()
        began = time.perf_counter()
        call()
        calls = _calls(time.perf_counter() - began, sets)

        def loop() -> float:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - began

        return Ready(loop, calls, False, _rounds(loop(), seconds))

    def check(self) -> None:
        return
