"""Decoding with experts that are fetched a token early: table I, and figures 12, 13 and 14.

The slots of a layer hold experts that were used often, and those that a predictor expects of the
next token. How often it is right is measured of our embedded model (``bench.cache.predict``), how
uneven choices are too. What comes takes the link while the step runs; where it takes longer than
that, the step waits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from model.planner.machines import find_machine
from runtime.devices.sim.routing import Routing
from runtime.devices.sim.step import SimulatedStep

from ..cells import ABOUT, LESS, Cell, file_of
from ..on import run
from ..rows import RESULTS
from ..skew import measured_law
from . import told
from .shapes import experts_of

AHEAD = {
    "token": RESULTS / "amd-epyc-znver5-2-cores" / "2026-11-28-experts-a-token-early.json",
    "layer": RESULTS / "amd-epyc-znver5-2-cores" / "2026-11-28-experts-a-layer-early.json",
}
CACHE = RESULTS / "nvidia-h200-with-16-emeraldrapids-cores" / "2026-11-27-cache-embedded.json"
MOST = 4
"""Experts of a layer that a step fetches, in figure 14."""


@dataclass(frozen=True)
class Fetching:
    """A step with so many experts of each layer fetched for the next one.

    Attributes:
        hits: of the choices, those that slots have; ``link_gbps``: that fetching takes on average.
    """

    step: SimulatedStep
    seconds: float
    hits: float
    link_gbps: float


def precision(ahead: str, count: int) -> float:
    """How many of so many experts that are predicted are chosen, in the mean of all layers; between
    the numbers that were recorded on a straight line."""
    lines = json.loads(AHEAD[ahead].read_text())["lines"]
    columns = [int(word) for word in lines[0].split()[3:]]
    rows = [line.split(maxsplit=1)[1] for line in lines[1:]]
    right = [
        [float(share.split()[-1]) / 100 for share in row.split("%")[:-1]]
        for row in rows
        if row.startswith("trained  ")
    ]
    return float(np.interp(count, columns, np.mean(right, axis=0)))


def fetching(model: str, count: int) -> Fetching:
    """A step of a model with ``count`` experts of each layer fetched."""
    experts = experts_of(model)
    E, topk = experts.E, experts.topk
    law = measured_law()
    stay = told.SLOTS - max(0, count)
    hits = law.share(E, topk, 0, stay)
    if count:
        hits += count * precision("token", count) / topk * (1 - hits)
    step = run(
        told.MODELS[model],
        told.FMT,
        told.NODE,
        system=told.EAGER,
        slots=told.SLOTS,
        routing=_with_share(E, topk, hits),
    ).decode
    nbytes = count * experts.nbytes * experts.layers
    gpu = find_machine(told.NODE).gpu
    assert gpu is not None
    seconds = max(step.seconds, nbytes / (gpu.link_gbps * 1e9))
    return Fetching(step, seconds, hits, nbytes / seconds / 1e9)


def _with_share(E: int, topk: int, share: float) -> Routing:
    """The law by which what the slots hold has this share of the choices."""
    low, high = 0.0, 3.0
    for _ in range(30):
        middle = (low + high) / 2
        short = Routing(middle).share(E, topk, 0, told.SLOTS) < share
        low, high = (middle, high) if short else (low, middle)
    return Routing(low)


def table1() -> list[Cell]:
    """Means over the data sets, and each data set's own."""
    found = []
    for model, arch in told.MODELS.items():
        paper = told.means(model)
        plain = run(arch, told.FMT, told.NODE, system=told.EAGER).decode_tok_s
        best = fetching(model, told.PREFETCHED[model])
        ours = {"KTransformers": plain, "SMOE": 1 / best.seconds}
        for name in told.COLUMNS:
            given = (model, name) == ("DeepSeek-V3", "KTransformers")
            value, what = ours.get(name), f"{model}, {name}, mean"
            found.append(Cell("Table I", what, "tok/s", paper[name], value, given=given))
        gain = paper["SMOE"] / paper["KTransformers"]
        what = f"{model}, SMOE over KTransformers, mean"
        found.append(Cell("Table I", what, "x", gain, 1 / best.seconds / plain))
    for model, sets in told.TABLE_I.items():
        for name, speeds in sets.items():
            pairs = zip(told.COLUMNS, speeds, strict=True)
            found += [Cell("Table I", f"{model}, {name}, {p}", "tok/s", s) for p, s in pairs]
    return found


def figure12() -> list[Cell]:
    """What the GPU and the link do meanwhile."""
    found = []
    for model, count in told.PREFETCHED.items():
        best = fetching(model, count)
        busy = 100 * best.step.busy("cuda:0")
        rate = best.link_gbps
        told_of = model == "DeepSeek-V3"
        paper = (told.GPU_BUSY, told.LINK_GBPS) if told_of else (None, None)
        says = (ABOUT, LESS) if told_of else ("", "")
        found += [
            Cell("Figure 12", f"{model}: GPU busy", "%", paper[0], busy, says=says[0]),
            Cell("Figure 12", f"{model}: link", "GB/s", paper[1], rate, says=says[1]),
        ]
    return found


def figure13() -> list[Cell]:
    """What a layer waits for two experts, fetched a layer early (HybriMoE) or a token early."""
    found = []
    for model in told.MODELS:
        count = experts_of(model).layers
        here = fetching(model, 2)
        gpu = find_machine(told.NODE).gpu
        assert gpu is not None
        brings = 2 * experts_of(model).nbytes / (gpu.link_gbps * 1e9)
        takes = _seconds_of_layer(here.step, count)
        own = _seconds_of_gpu(here.step)
        paper = told.LAYER_WISE_WAIT_MS if model == "DeepSeek-V3" else None
        late = 1e3 * max(0.0, brings - own)
        says = ABOUT if paper else ""
        what = f"{model}, a layer early: wait for the cache"
        found.append(Cell("Figure 13", what, "ms a layer", paper, late, says=says))
        what = f"{model}, a token early: wait for the cache"
        late = 1e3 * max(0.0, here.seconds - here.step.seconds) / count
        found.append(Cell("Figure 13", what, "ms a layer", None, late))
        what = f"{model}, a layer of two experts fetched"
        found.append(Cell("Figure 13", what, "ms a layer", None, 1e3 * takes))
        what = f"{model}, of it GPU"
        found.append(Cell("Figure 13", what, "ms a layer", None, 1e3 * own))
    return found


def _seconds_of_layer(step: SimulatedStep, count: int) -> float:
    return step.seconds / count


def _seconds_of_gpu(step: SimulatedStep) -> float:
    """What a layer's nodes take on the GPU; meanwhile the next ones come, a layer early."""
    own = [ran for ran in step.ran if ran.lane[0] != "cpu" and ran.node.layer is not None]
    count = len({ran.node.layer for ran in own})
    return sum(ran.cost.seconds for ran in own) / count


def figure14() -> list[Cell]:
    """Speed and hits by experts that are fetched; -1 and 0 of the paper are both none here."""
    found = []
    for model in told.MODELS:
        each = {count: fetching(model, count) for count in range(MOST + 1)}
        for count, one in each.items():
            what = f"{model}, {count} fetched a token early"
            found.append(Cell("Figure 14", what, "tok/s", None, 1 / one.seconds))
            found.append(Cell("Figure 14", what, "% hits", None, 100 * one.hits))
        best = max(each, key=lambda count: 1 / each[count].seconds)
        what, paper = f"{model}: fetched at the best", told.PREFETCHED[model]
        found.append(Cell("Figure 14", what, "experts", paper, best))
    return [*found, *_measured()]


def _measured() -> list[Cell]:
    """Our cache with its own policy, of the embedded model."""
    data = json.loads(CACHE.read_text())
    found = []
    for row in data["rows"]:
        name = f"embedded model, {row['policy'] or 'no cache'}, {row['slots']} slots"
        name += f", {row['swaps']} exchanged"
        if row["kind"] == "measured":
            speed = row["decode_tok_s"]
            found.append(
                Cell(
                    "Figure 14", f"H200: {name}", "tok/s here", measured=speed, file=file_of(CACHE)
                )
            )
        if row["kind"] == "measured" and row["slots"]:
            hits = 100 * row["hit_rate"]
            found.append(Cell("Figure 14", name, "% hits", measured=hits, file=file_of(CACHE)))
    return found


def figure3() -> list[Cell]:
    """How often predictions are right, as many as a token takes experts."""
    found = []
    for ahead, names in (
        ("layer", {"trained": "a layer early", "most chosen": "by what was chosen often"}),
        ("token", {"trained": "a token early", "this token's experts": "the last step's experts"}),
    ):
        lines = json.loads(AHEAD[ahead].read_text())["lines"]
        place = [int(word) for word in lines[0].split()[3:]].index(6)
        for line in lines[1:]:
            layer, text = line.split(maxsplit=1)
            for known, name in names.items():
                if text.startswith(known + "  "):
                    value = float(text.split("%")[place].split()[-1])
                    what = f"embedded model, layer {layer}, {name}"
                    file = file_of(AHEAD[ahead])
                    found.append(Cell("Figure 3", what, "% right", measured=value, file=file))
    return found
