"""How unevenly the routers of a trained model choose, as a law: of the embedded model."""

from __future__ import annotations

import functools
import json

from runtime.devices.sim.routing import Routing

from .rows import RESULTS

FILE = RESULTS / "nvidia-h200-with-16-emeraldrapids-cores" / "2026-11-27-cache-embedded.json"


@functools.lru_cache(maxsize=1)
def measured_law() -> Routing:
    """The law by which the most used experts have as large a share as in the recorded run."""
    data = json.loads(FILE.read_text())
    row = next(row for row in data["rows"] if "best_fixed" in row)
    low, high = 0.0, 2.0
    for _ in range(20):
        middle = (low + high) / 2
        law = Routing(middle)
        short = law.share(data["experts"], data["topk"], 0, row["slots"]) < row["best_fixed"]
        low, high = (middle, high) if short else (low, middle)
    return Routing(round(low, 2))
