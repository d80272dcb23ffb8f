"""`python -m bench.serving.beside`: our server and llama.cpp's in turns, under the same load.

Both serve the same GGUF file: random weights of a well-known shape. Both get the same prompts, as
token ids, and write as many tokens. In each round each server is started, driven and ended, so that
neither takes a core from the other. A run that is stopped tells its whole rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bench.harness.keeping.ending import end_on_signals, ending, why_ended
from bench.harness.keeping.provenance import provenance
from bench.peers.gguf_files.types import TYPES
from bench.peers.gguf_files.write import FAMILIES, model_file
from model.named import make_config
from pykernels.errors import PykernelsError
from runtime.machine.topology import Topology

from .client import Accepted, Server
from .drive import drive
from .figures import figures
from .llama_server import LlamaServer
from .process import ServerProcess
from .workload import Load, plan

OURS, PEER = "pykernels", "llama-server"
_FIRST_WORD = 512
"""Ids below may be bytes and markers."""


class Running(Protocol):
    url: str


Start = Callable[[], AbstractContextManager[Running]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.beside", description=__doc__)
    parser.add_argument("--arch", default="qwen3-30b", help="qwen3-30b or mixtral-8x7b")
    parser.add_argument("--format", default="q4_k", choices=sorted(TYPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--threads", type=int, help="default: one on each physical core")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/gguf"), help="of the file")
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else")
    options = parser.parse_args(arguments)
    rounds = Rounds(options.rounds)
    code, why = 0, ""
    try:
        compare(options, rounds)
    except KeyboardInterrupt as error:
        code, why = 130, why_ended(error)
    except (PykernelsError, OSError) as error:
        code, why = 2, str(error)
        print(f"error: {error}", file=sys.stderr)
    if rounds.whole:
        print(json.dumps(provenance() | rounds.results(why)) if options.json else rounds.told())
    return code


class Rounds:
    """What was measured so far, by server."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: dict[str, list[dict[str, Any]]] = {OURS: [], PEER: []}

    @property
    def whole(self) -> int:
        """Rounds in which both servers had their turn."""
        return min(map(len, self.rows.values()))

    def medians(self) -> dict[str, dict[str, float]]:
        """Medians of the complete rounds of each server."""
        return {name: _medians(rows[: self.whole]) for name, rows in self.rows.items()}

    def results(self, why: str) -> dict[str, Any]:
        """``medians`` and how the run ended, for JSON."""
        missing = [f"round {number + 1}" for number in range(self.whole, self.count)]
        return {**self.medians(), "rounds": self.rows, **ending(missing, why)}

    def told(self) -> str:
        """``medians`` as a table."""
        few = f"\n{self.whole} of {self.count} rounds" if self.whole < self.count else ""
        return _told(self.medians()) + few


def compare(options: argparse.Namespace, rounds: Rounds) -> None:
    """Adds each server's turn of each round to the rounds, as it is measured.

    Raises:
        PykernelsError: a shape that cannot be had, a server that does not start or fails.
    """
    config = make_config(options.arch, num_hidden_layers=options.layers, vocab_size=options.vocab)
    if config.model_type not in FAMILIES:
        raise PykernelsError(f"no GGUF file is written of {options.arch}", "Use qwen3-30b")
    name = f"{options.arch}-{options.layers}-layers-{options.vocab}-words"
    file = model_file(config, options.format, options.folder, name, vocabulary=True)
    threads = options.threads or Topology.detect().default_threads()
    places = options.prompt + options.tokens + 64
    ours = [
        *("--model", str(file), "--threads", str(threads), "--name", "model"),
        *("--max-batch", str(options.clients), "--max-model-len", str(places)),
        *("--kv-tokens", str(options.clients * places)),
    ]
    servers: dict[str, Start] = {
        OURS: partial(ServerProcess, ours),
        PEER: partial(LlamaServer, file, threads, options.clients, places),
    }
    for seed in range(options.rounds):
        for name, start in servers.items():
            with start() as server:
                rounds.rows[name].append(asyncio.run(_driven(server.url, options, seed)))


async def _driven(url: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    load = Load(
        options.requests, math.inf, options.clients, options.prompt, options.tokens, 0, 0.0, seed
    )
    accepted = Accepted("model", range(_FIRST_WORD, options.vocab), 1.0, True)
    async with Server(url, None) as server:
        warm = Load(options.clients, math.inf, options.clients, 64, 8, 0, 0.0, seed + 1000)
        await drive(server, accepted, warm, plan(warm, accepted.vocabulary))
        outcomes = await drive(server, accepted, load, plan(load, accepted.vocabulary))
    row = figures(load, outcomes)
    if row["completed"] < load.requests or row["output_tokens"] < load.requests * load.tokens:
        raise PykernelsError(
            f"{url}: {row['completed']} of {load.requests} answers with {row['output_tokens']}"
            " tokens",
            row["why"] or "Answers were shorter than asked for",
        )
    return row


def _medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = "output_tok_s", "ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50"
    return {name: statistics.median(row[name] for row in rows) for name in names}


def _told(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':<14}{'tokens/s':>10}{'TTFT p50':>12}{'TTFT p90':>12}{'a token':>12}"]
    for name, row in rows.items():
        times = "".join(f"{row[key]:>9.1f} ms" for key in list(row)[1:])
        lines.append(f"{name:<14}{row['output_tok_s']:>10.1f}{times}")
    ours, peer = rows[OURS], rows[PEER]
    lines.append(
        f"{OURS} / {PEER}: {ours['output_tok_s'] / peer['output_tok_s']:.2f} x the tokens a second,"
        f" {ours['ttft_ms_p90'] / peer['ttft_ms_p90']:.2f} x the p90 time to first token"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
