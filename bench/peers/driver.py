"""The peer's side of the wire: python -m bench.peers.driver ENGINE MODE THREADS LAYERS MAX E H I K

One JSON object a line, both ways. First it says ``{"ready": true, "versions": {...}}``; then it
answers
  ``{"op": "prepare", "tokens": T, "ids": [[...], ...]}``  with ``{"finite": true}``,
  ``{"op": "turn", "seconds": s, "most": n}``              with ``{"calls": [[routing, s], ...]}``.
A failure is ``{"error": "..."}`` and the end. Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from importlib import metadata
from typing import Any, TextIO

from bench.peers.engines import ENGINES, Engine, Shape

_PR_SET_PDEATHSIG = 1


class Turns:
    """The calls of one engine: every layer in turn with one routing, then with the next, as ours
    (``runtime.profiling.workload.call_of``), so that weights come from memory."""

    def __init__(self, engine: Engine, layers: int) -> None:
        self.engine, self.layers, self.routings, self.next = engine, layers, 0, 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        if request["op"] == "prepare":
            self.routings, self.next = len(request["ids"]), 0
            self.engine.prepare(request["tokens"], request["ids"])
            self._call()
            return {"finite": self.engine.finite()}
        if request["op"] == "turn":
            calls: list[tuple[int, float]] = []
            end = time.perf_counter() + request["seconds"]
            while not calls or (time.perf_counter() < end and len(calls) < request["most"]):
                calls.append(self._call())
            return {"calls": calls}
        raise ValueError(f"unknown op {request['op']!r}")

    def _call(self) -> tuple[int, float]:
        layer, routing = self.next % self.layers, self.next // self.layers % self.routings
        self.next += 1
        start = time.perf_counter()
        self.engine.call(routing, layer)
        return routing, time.perf_counter() - start


def serve(engine: str, mode: str, numbers: list[int], requests: TextIO, replies: TextIO) -> None:
    """Makes the engine and answers until the requests end."""

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        threads, layers, most_tokens, *sizes = numbers
        made = ENGINES[engine](mode, Shape(*sizes), threads, layers, most_tokens)
        turns = Turns(made, layers)
        reply({"ready": True, "versions": versions(engine)})
        for line in requests:
            reply(turns.answer(json.loads(line)))
    except Exception as error:  # every failure becomes a row of the table
        reply({"error": " ".join(f"{type(error).__name__}: {error}".split())})


def versions(engine: str) -> dict[str, str]:
    """The engine's version, and that of the torch that it runs on."""
    if engine == "llama.cpp":
        return {engine: f"llama-cpp-python {metadata.version('llama-cpp-python')}"}
    names = (engine,) if engine in ("numpy", "torch") else (engine, "torch")
    return {name: metadata.version(name) for name in names}


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # die with the parent, even stopped
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        serve(sys.argv[1], sys.argv[2], [int(a) for a in sys.argv[3:]], sys.stdin, replies)
        replies.flush()
        os._exit(0)  # kt-kernel's threads do not always let the interpreter end


if __name__ == "__main__":
    main()
