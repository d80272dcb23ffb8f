"""The rows of one model in one format: of each case in each place, with the peers beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from statistics import mean, median

from bench.tables.e2e import Row
from runtime.profiling.engine_speed import decode_speed

from .players import Case, Engines, Played
from .settings import Settings
from .turns import Turns


def named(settings: Settings, arch: str, fmt: str, case: Case, place: str) -> Row:
    """The columns that name a row."""
    return {
        "op": f"e2e {case.op}",
        "name": "pykernels",
        "place": place,
        "model": arch,
        "format": fmt,
        "layers": settings.layers,
        "threads": settings.threads,
        "tokens": case.tokens,
        "batch": case.batch,
        "context": case.context,
    }


def rows_of(arch: str, fmt: str, turns: Turns, why_late: str = "") -> list[Row]:
    """The rows of all turns so far; where ours cannot run, they say why.

    Args:
        why_late: why some have had fewer turns than were asked for; "": none has.
    """
    s, rows = turns.settings, list[Row]()
    for case, place in product(s.cases, turns.mine):
        row, mine = named(s, arch, fmt, case, place), turns.mine[place]
        if not mine:
            if place in turns.failed:
                rows.append(row | {"why": turns.failed[place]})
            continue
        rates = {number: turn[case] for number, turn in mine.items()}
        row |= {"kernel": turns.ours.backend(s.kernel), "rounds": len(rates)}
        row["tok_s"] = round(median(rates.values()), 2)
        if case.op == "decode":
            row |= _step(turns.engines[place], case, turns.ours.layers, mean(turns.roofs))
        row |= _peers(case, rates, turns)
        if len(rates) < s.rounds and (why := turns.failed.get(place) or why_late):
            row["why_further rounds"] = why
        rows.append(row)
    return rows


def _step(engines: Engines, case: Case, layers: int, roof_gbps: float) -> Row:
    """The figures of a step; ``tok_s`` stands for ``decode_tok_s``."""
    runner = engines.timer(case).runner
    program = runner.decode_steps[0].program
    figures = decode_speed(engines.steps[case], program, case.batch, layers, roof_gbps)
    row = {key: value for key, value in asdict(figures).items() if key != "decode_tok_s"}
    return row | {"deferred": runner.deferred}


def _peers(case: Case, mine: Mapping[int, float], turns: Turns) -> Row:
    """The columns of all peers that have played this case, or why one has none."""
    row: Row = {}
    for name, theirs in turns.theirs.items():
        played = {number: turn[case] for number, turn in theirs.items() if case in turn}
        if name not in turns.whys and played.keys() & mine.keys():
            row |= _against(name, mine, played)
    return row | {f"why_{name}": why for name, why in turns.whys.items()}


def _against(name: str, mine: Mapping[int, float], theirs: Mapping[int, Played]) -> Row:
    """A peer's columns: its tokens a second, how many times faster ours is, the median of the
    rounds that both have, and its options."""
    both = sorted(mine.keys() & theirs.keys())
    return {
        f"tok_s_{name}": round(median(played.tok_s for played in theirs.values()), 2),
        f"x_{name}": round(median(mine[number] / theirs[number].tok_s for number in both), 3),
        f"settings_{name}": theirs[both[-1]].settings,
    }
