"""A whole run: every section for every format, peers in turn, one dictionary at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from pykernels.target import Target
from runtime.topology import Topology

from .cases import Settings, layer_shape
from .machine import describe
from .ours import OurWeights
from .peer_table import PeerTable
from .quiet import Watch
from .sections import Bench

Step = Callable[[str, float], None]
"""Called before each part with its name, and the share of the whole that is done by then."""


def run(settings: Settings, target: Target, step: Step) -> dict[str, Any]:
    """Measures; returns what ``report`` and ``plots`` show and what is kept as JSON.

    Raises:
        PykernelsError: too little memory for the smallest layer.
    """
    shape = layer_shape(Topology.detect().memory_available, settings.quick)
    most_tokens = max(tokens.of(shape) for tokens in settings.tokens)
    peers = PeerTable(shape, target, settings.threads, most_tokens)
    table, latency, threads, skew = [], [], [], []
    watch = Watch()
    parts = len(settings.formats) * (len(settings.tokens) + 3) + 1
    done = 0

    def begin(what: str) -> None:
        nonlocal done
        step(what, done / parts)
        done += 1

    machine = describe(target)
    try:
        bench = Bench(settings, target, shape, peers)
        for number, fmt in enumerate(settings.formats):
            peers.retire(settings.formats[number:])
            begin(f"{fmt}: weights")
            weights = OurWeights(fmt, shape)
            for tokens in settings.tokens:
                unit = " per expert" if tokens.per_expert else ""
                what = f"{fmt}: {tokens.count} tokens{unit}"
                begin(what)
                table += watch.run(what, partial(bench.table, weights, tokens))
            begin(f"{fmt}: latency by tokens")
            latency += watch.run(f"{fmt}: latency", partial(bench.latency, weights))
            begin(f"{fmt}: threads")
            threads += watch.run(f"{fmt}: threads", partial(bench.threads, weights))
            del weights
        peers.close()
        begin("scheduling under skew")
        fmt = "fp8" if "fp8" in settings.formats else settings.formats[0]
        skew = watch.run("skew", partial(bench.skew, fmt))
    finally:
        peers.close()
    step("done", 1.0)
    machine["versions"] |= peers.versions
    return {
        "schema": 1,
        "machine": machine,
        "shape": asdict(shape),
        "settings": asdict(settings),
        "disturbed": watch.disturbed,
        "untimed": bench.untimed(settings.formats),
        "table": table,
        "latency": latency,
        "threads": threads,
        "skew": skew,
    }
