"""Committed runs beside what the simulated device says of them, from shapes and the machine's file
alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import model
from model.inspection.subject import open_subject
from model.planner.machines import find_machine
from model.planner.placing import Placed, placed
from model.planner.predict import predict_prompt
from model.planner.settings import Case, Wanted
from model.planner.subject import Subject
from runtime.devices.sim.cost import Load
from runtime.devices.sim.machine import Machine
from runtime.devices.sim.routing import Routing
from runtime.devices.sim.step import SimulatedStep, simulate
from runtime.kv_cache.layout import PAGE
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import Phase
from runtime.planning.placement import CPU

from .rows import ACTUAL, UNSTEADY, Row, committed

RANDOM = Routing(1.8)
"""How unevenly the routers of random weights send a prompt's tokens: as they send batches, whose
bytes are counted."""
CALIBRATING = {
    ("zen2-2-cores", "decode", "qwen3-30b", 4, "cpu", 1, 512): ("bf16", "q8_0", "q4_k"),
    ("zen2-2-cores", "prompt", "qwen3-30b", 4, "cpu", 1, 512): ("bf16",),
    ("xeon-amx-2-cores", "decode", "qwen3-30b", 4, "cpu", 1, 512): ("bf16", "q8_0", "q4_k"),
    ("xeon-amx-2-cores", "prompt", "qwen3-30b", 4, "cpu", 1, 512): ("bf16", "q8_0"),
    ("h200-16-cores", "decode", "deepseek-v3", 4, "cpu", 1, 512): ("fp8",),
    ("h200-16-cores", "decode", "deepseek-v3", 8, "cpu", 1, 4096): ("fp8",),
    ("h200-16-cores", "decode", "embedded", 6, "cpu", 1, 512): ("fp8",),
    ("h100-16-cores", "decode", "embedded", 6, "cpu", 1, 256): ("fp8",),
    ("h200-16-cores", "prompt", "qwen3-30b", 24, "cpu", 1, 512): ("q4_k",),
    ("h200-16-cores", "prompt", "qwen3-30b", 24, "cuda:0", 1, 512): ("q4_k",),  # GPU alone
}
"""The rows that ``calibrated_on`` of the machines' files names, which tell nothing of a prediction:
machine, kind, model, layers, device, batch and context, and in which formats."""
TARGETS = {"decode": (0.07, 0.15), "prompt": (0.10, 0.20)}
"""Median and worst error that are aimed at."""


@dataclass(frozen=True)
class Compared:
    """A row with its prediction, in the row's unit; ``why_not``: for which it does not count."""

    row: Row
    predicted: float
    bound: str
    routing: Routing
    why_not: str = ""

    @property
    def error(self) -> float:
        """How far the predicted time is from the measured one, relative to it."""
        if self.row.kind == "decode":
            return self.predicted / self.row.measured - 1
        return self.row.measured / self.predicted - 1

    @property
    def counts(self) -> bool:
        """Whether the row tells something of the simulator."""
        return not self.why_not


@functools.lru_cache(maxsize=64)
def _subject(
    arch: str, fmt: str, layers: int, vocab: int, kv_dtype: str, positions: int
) -> Subject:
    """A row's model, with as many positions at least: ours has random weights, whatever its shape
    was made for."""
    if arch == "embedded":
        return open_subject(str(model.EMBEDDED), kv_dtype=kv_dtype)
    found = open_subject(arch, fmt, kv_dtype, layers=layers, vocab=vocab or None)
    found.config.max_position_embeddings = max(found.positions, positions)
    return found


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Predicts each row."""
    newest: dict[tuple[object, ...], str] = {}
    laws: dict[tuple[object, ...], Routing] = {}
    for row in rows:
        newest[_same(row)] = max(newest.get(_same(row), ""), row.date)
        if row.experts == "cpu" and row.batch > 1 and not row.deferred and row.date >= ACTUAL:
            laws.setdefault((row.arch, row.layers, row.batch), _law(_case(row), row))
    return [_compared(row, laws, newest[_same(row)]) for row in rows]


def predicted(rows: Sequence[Row], machine: Machine) -> list[Compared]:
    """Predicts each row as a run on this machine; batches whose bytes nobody counted as uneven as
    ``RANDOM``."""
    laws: dict[tuple[object, ...], Routing] = {
        (row.arch, row.layers, row.batch): RANDOM for row in rows if row.batch > 1
    }
    return [_compared(row, laws, row.date, machine) for row in rows]


def _same(row: Row) -> tuple[object, ...]:
    """What two rows have in common of which the newer one counts."""
    machine = find_machine(row.machine)
    there = repr(machine.cpu) if row.device == "cpu" else row.machine
    shape = row.arch, row.fmt, row.layers, row.threads
    how = row.device, row.experts, row.deferred, row.lanes, row.slots, row.way, row.kv_dtype
    return there, row.kind, shape, how, row.batch, row.context


def _case(row: Row, machine: Machine | None = None) -> Placed:
    machine = machine or find_machine(row.machine)
    if row.threads < machine.cpu.cores:
        machine = machine.with_threads(row.threads)
    run = ExecutionConfig(
        device=row.device,
        experts=("cpu" if row.experts == "cpu" else "gpu") if row.device != "cpu" else "auto",
        defer=row.deferred or None,
        dual_batch=row.lanes > 1,
    )
    prompt = row.context if row.kind == "prompt" else 64
    context = row.context if row.kind == "decode" else 1
    pages = row.batch * (-(-row.most // PAGE) + 2) + 3 if row.most else None
    wanted = Wanted(context, prompt, row.batch, 1, RANDOM, pages=pages)
    model_of = row.arch, row.fmt, row.layers, row.vocab
    subject = _subject(*model_of, row.kv_dtype, 1 << (wanted.positions - 1).bit_length())
    found = placed(Case(subject, machine, run, wanted))
    return found.with_slots(row.slots) if row.slots else found


def _compared(
    row: Row,
    laws: Mapping[tuple[object, ...], Routing],
    newest: str,
    machine: Machine | None = None,
) -> Compared:
    there, why_not = _case(row, machine), ""
    place = row.device if row.device == "cpu" or row.experts == "gpu" else "beside"
    key = row.machine, row.kind, row.arch, row.layers, place, row.batch, row.context
    if row.date < newest:
        why_not = "older"
    elif row.fmt in CALIBRATING.get(key, ()):
        why_not = "calibrated on"
    elif row.spread > UNSTEADY:
        why_not = "unsteady"
    elif row.batch > 1 and row.date < ACTUAL:
        why_not = "routing not counted"
    if row.kind == "prompt":
        if row.way:
            run = replace(there.case.execution, prefill=row.way)
            there = replace(there, case=replace(there.case, execution=run))
        prompt = predict_prompt(there, row.context)
        return Compared(row, prompt.tok_s, prompt.bound, RANDOM, why_not)
    law = _law(there, row) if row.nbytes else laws.get((row.arch, row.layers, row.batch), Routing())
    step = _step(there, row, law)
    return Compared(row, step.seconds * 1e6, step.bound, law, why_not)


def _step(there: Placed, row: Row, law: Routing) -> SimulatedStep:
    load = Load(row.batch, row.context, row.batch, law)
    return simulate(there.compiled(Phase.DECODE, row.batch), there.case.machine, load)


def _law(there: Placed, row: Row) -> Routing:
    """How unevenly the run's tokens chose, so that the CPU reads the bytes that the run counted: an
    input as the prompt is, of which no time is known."""
    if row.batch == 1 or row.date < ACTUAL or not row.nbytes:
        return Routing()

    def read(zipf: float) -> float:
        step = _step(there, row, Routing(zipf))
        return sum(ran.cost.main_bytes for ran in step.ran if ran.node.device == CPU)

    low, high = 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if read(middle) > row.nbytes else (low, middle)
    return Routing(round((low + high) / 2, 2))


def errors(found: Sequence[Compared], kind: str) -> tuple[float, float]:
    """Median and worst error of the rows that count."""
    every = [abs(each.error) for each in found if each.row.kind == kind and each.counts]
    return (median(every), max(every)) if every else (0.0, 0.0)


def ranked(found: Sequence[Compared]) -> tuple[int, int]:
    """How many pairs of rows are predicted in their order, and how many pairs there are: of rows
    that differ in where or with which options alone, and by 5 % at least."""
    right = pairs = 0
    for one, other in combinations((each for each in found if each.counts), 2):
        a, b = one.row, other.row
        alike = a.machine, a.kind, a.arch, a.fmt, a.layers, a.batch, a.context
        if alike != (b.machine, b.kind, b.arch, b.fmt, b.layers, b.batch, b.context):
            continue
        if abs(a.measured / b.measured - 1) < 0.05:
            continue
        pairs += 1
        right += (a.measured > b.measured) == (one.predicted > other.predicted)
    return right, pairs


def page(found: Sequence[Compared]) -> str:
    """The comparison as Markdown."""
    text = [
        "# Predicted beside measured",
        "",
        "`python -m bench.papers validate`: every committed run of a whole model of ours, and what"
        " `pykernels plan`'s simulator says of it from the shape, the options and the"
        " machine's file"
        " in [bench/machines](../../machines). Errors are of the time. Rates of the"
        " 16-core machines"
        " are those of tables of kernels, but for what `calibrated_on` in their files"
        " names. A batch's"
        " routing is an input: as uneven as makes the bytes that the run counted; prompts have the"
        " law of these batches.",
        "",
        "Rows in brackets do not count: a constant was taken from them (*calibrated"
        " on*); a newer row"
        " has the same options on the same hardware, when the program was faster (*older*); their"
        f" 90th percentile is over {UNSTEADY} times the 10th (*unsteady*); nobody counted which"
        " experts their batch read (*routing not counted*).",
        "",
        "These rows were compared several times while the simulator was made, and its"
        " constants and the rules of what counts changed after some of these comparisons:"
        " the errors are those of a fit, not of a forecast.",
        "",
    ]
    for kind, (middle, worst) in TARGETS.items():
        have = errors(found, kind)
        count = sum(each.row.kind == kind and each.counts for each in found)
        text.append(
            f"**{kind}**: {count} rows, median error {have[0]:.1%} (target {middle:.0%}),"
            f" worst {have[1]:.1%} (target {worst:.0%})."
        )
    right, pairs = ranked(found)
    text.append("")
    text.append(
        f"**Ranking**: of {pairs} pairs of rows that differ in place or options alone, by 5 % at"
        f" least, {right} are predicted in the measured order."
    )
    for kind, unit in (("decode", "us a step"), ("prompt", "tok/s")):
        text += ["", f"## {kind}, {unit}", ""]
        text += [
            "| machine | model | where | batch | context | measured | predicted | error |"
            " bound by |"
        ]
        text += ["|---|---|---|---:|---:|---:|---:|---:|---|"]
        for each in found:
            row = each.row
            if row.kind != kind:
                continue
            error = f"{each.error:+.1%}"
            text.append(
                f"| {row.machine} | {row.arch}, {row.layers} layers, {row.fmt} | {row.place} |"
                f" {row.batch} | {row.context} | {row.measured:.0f} | {each.predicted:.0f} |"
                f" {error if each.counts else f'[{error}, {each.why_not}]'} | {each.bound}"
                f"{f', zipf {each.routing.zipf}' if each.routing.zipf else ''} |"
            )
    return "\n".join(text) + "\n"


def validate(out: Path) -> list[Compared]:
    """Compares all, and writes the page."""
    found = compare(list(committed()))
    out.mkdir(parents=True, exist_ok=True)
    (out / "validate.md").write_text(page(found))
    return found


def as_dict(found: Sequence[Compared]) -> dict[str, Any]:
    """The comparison as JSON's types."""
    rows = [
        asdict(each.row)
        | {"predicted": round(each.predicted, 1), "error": round(each.error, 4)}
        | {"bound": each.bound, "zipf": each.routing.zipf, "why_not": each.why_not}
        for each in found
    ]
    return {
        kind: dict(zip(("median", "worst"), errors(found, kind), strict=True)) for kind in TARGETS
    } | {"rows": rows}
