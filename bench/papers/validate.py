"""Committed runs beside what the simulated device says of them, from shapes and the machine's file
alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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

from .compared import Compared
from .moved import PAIRS, moved
from .rows import ACTUAL, APART, UNSTEADY, Row

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
UNTIMED = "fp8", 512
"""Format and tokens of prompts on a GPU from which on it is multiplied by kernels that no table of
ours has: E4M3 beside bf16 activations, of many rows. They count as those of bf16."""
TARGETS = {"decode": (0.07, 0.15), "prompt": (0.10, 0.20)}
"""Median and worst error that are aimed at."""


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
    of_day: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        newest[_same(row)] = max(newest.get(_same(row), ""), row.date)
        of_day.setdefault((*_same(row), row.date, row.steps), []).append(row.measured)
    laws = _laws(rows)
    return [
        _compared(replace(row, apart=max(row.apart, max(every) / min(every))), laws, newest[same])
        for row in rows
        if (same := _same(row)) and (every := of_day[(*same, row.date, row.steps)])
    ]


def _laws(rows: Sequence[Row], machine: Machine | None = None) -> dict[tuple[object, ...], Routing]:
    """How unevenly the tokens of a run's batches choose, by ``_batch``: the middle of what the
    bytes of its steps say. Of runs that counted none, by the same without the run: the middle of
    others of the model and the batch, or of the nearest batch."""
    every: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if row.batch > 1 and row.nbytes and row.date >= ACTUAL and row.experts == "cpu":
            law = _law(_case(row, machine), row).zipf
            for key in (_batch(row), _batch(row)[:3]):
                every.setdefault(key, []).append(law)
    found = {key: Routing(round(median(laws), 2)) for key, laws in every.items()}
    for row in rows:
        own = [key for key in every if key[:2] == (row.arch, row.layers) and len(key) == 3]
        if row.batch > 1 and own:
            nearest = min(own, key=lambda key: abs(int(str(key[2])) - row.batch))
            found.setdefault(_batch(row), found.get(_batch(row)[:3], found[nearest]))
    return found


def _batch(row: Row) -> tuple[object, ...]:
    """Rows with the same routing: of a run, its contexts are as alike as they are random."""
    return row.arch, row.layers, row.batch, row.file


def compare_moved(found: Sequence[Compared]) -> dict[tuple[str, str], list[Compared]]:
    """By where constants are from and where they are taken to, rows of the latter; those count too
    from which its own constants were taken."""
    laws, every = _laws([each.row for each in found]), {}
    for known, there in PAIRS:
        machine = moved(known, there)
        rows = [
            each.row
            for each in found
            if each.row.machine == there
            and each.why_not in ("", "calibrated on")
            and (machine.gpu is not None or each.row.device == "cpu")
        ]
        every[known, there] = [_compared(row, laws, row.date, machine) for row in rows]
    return every


def predicted(rows: Sequence[Row], machine: Machine) -> list[Compared]:
    """Predicts each row as a run on this machine; batches whose bytes nobody counted as uneven as
    ``RANDOM``."""
    every = {_batch(row): RANDOM for row in rows if row.batch > 1}
    laws = every | _laws(rows, machine)
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
    if row.roof_gbps:  # machines of one kind differ: what is read of memory was timed in each run
        machine = machine.reading(row.roof_gbps)
    run = ExecutionConfig(
        device=row.device,
        experts=("cpu" if row.experts == "cpu" else "gpu") if row.device != "cpu" else "auto",
        defer=row.deferred or None,
        dual_batch=row.lanes > 1,
        gpus=row.gpus,
        prefill=row.way or "auto",
        kv_gpu_gib=row.kv_gpu_gib,
        kv_attention=row.kv_attention,
        gpu_gib=row.gpu_gib,
    )
    prompt = row.context if row.kind == "prompt" else 64
    context = row.context if row.kind == "decode" else 1
    pages = row.batch * (-(-row.most // PAGE) + 2) + 3 if row.most else None
    step = -(-row.context // row.steps) if row.steps else None
    wanted = Wanted(context, prompt, row.batch, 1, RANDOM, step_tokens=step, pages=pages)
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
    elif row.spread > UNSTEADY or row.apart > APART:
        why_not = "unsteady"
    elif row.kind == "prompt" and row.device != CPU and _is_untimed(row):
        why_not = "kernels never timed"
    elif row.batch > 1 and _batch(row) not in laws:
        why_not = "routing not counted"
    if row.kind == "prompt":
        if row.way:
            run = replace(there.case.execution, prefill=row.way)
            there = replace(there, case=replace(there.case, execution=run))
        prompt = predict_prompt(there, row.context)
        return Compared(row, prompt.tok_s, prompt.bound, RANDOM, why_not)
    law = laws.get(_batch(row), Routing()) if row.batch > 1 else Routing()
    step = _step(there, row, law)
    return Compared(row, step.seconds * 1e6, step.bound, law, why_not)


def _is_untimed(row: Row) -> bool:
    fmt, tokens = UNTIMED
    return row.fmt == fmt and row.context >= tokens


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


def errors(found: Sequence[Compared], kind: str, several: bool = False) -> tuple[float, float]:
    """Median and worst error of the rows that count.

    Args:
        several: those of several GPUs alone.
    """
    every = [
        abs(each.error)
        for each in found
        if each.row.kind == kind and each.counts and each.row.several >= several
    ]
    return (median(every), max(every)) if every else (0.0, 0.0)


def as_dict(found: Sequence[Compared]) -> dict[str, Any]:
    """The comparison as JSON's types."""
    rows = [
        asdict(each.row)
        | {"predicted": round(each.predicted, 1), "error": round(each.error, 4)}
        | {"bound": each.bound, "zipf": each.routing.zipf, "why_not": each.why_not}
        for each in found
    ]
    names = "median", "worst"
    every = {kind: dict(zip(names, errors(found, kind), strict=True)) for kind in TARGETS}
    several = {kind: dict(zip(names, errors(found, kind, True), strict=True)) for kind in TARGETS}
    return {**every, "several GPUs": several, "rows": rows}
