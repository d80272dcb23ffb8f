"""A model on a paper's machine: the simulated steps that cells are made of."""

from __future__ import annotations

import functools
from dataclasses import replace

from model.inspection.subject import open_subject
from model.planner.machines import find_machine
from model.planner.placing import Placed, placed
from model.planner.predict import Prediction, predict
from model.planner.settings import Case, Wanted
from runtime.devices.sim.machine import Machine
from runtime.planning.config import ExecutionConfig

LAYERS = 6
"""Of a model, of which steps are simulated; the others count as these."""


@functools.lru_cache(maxsize=64)
def _placed(
    arch: str,
    fmt: str,
    machine: str,
    defer: int,
    batch: int,
    dual: bool,
    positions: int,
    slots: int,
    step_tokens: int | None,
    streamed: bool,
) -> Placed:
    run = ExecutionConfig(
        device="cuda:0", experts="cpu", defer=defer or None, dual_batch=dual and batch > 1
    )
    wanted = Wanted(positions, 1, batch, 1, step_tokens=step_tokens)
    whole = open_subject(arch, fmt)
    thin = whole.thinned(LAYERS)
    # Streamed steps have as many tokens as memory allows beside all layers.
    found = placed(Case(whole if streamed else thin, find_machine(machine), run, wanted))
    found = replace(found, case=replace(found.case, subject=thin))
    return found.with_slots(slots) if slots else found


def run(
    arch: str,
    fmt: str,
    machine: str,
    *,
    prompt: int = 32,
    context: int = 300,
    batch: int = 1,
    defer: int = 0,
    dual: bool = False,
    slots: int = 0,
    way: str = "auto",
    on: Machine | None = None,
) -> Prediction:
    """Decoding and a prompt.

    Args:
        machine: its name in bench/machines; ``on``: it with other rates.
    """
    positions = 1 << (max(prompt, context) - 1).bit_length()
    streamed = way == "stream"
    tokens = 8192 if way == "cpu" else None  # the papers' programs read such prompts at once
    options = defer, batch, dual, positions, slots
    found = _placed(arch, fmt, machine, *options, tokens, streamed)
    there = on or found.case.machine
    wanted = replace(found.case.wanted, context=context, prompt=prompt)
    execution = replace(found.case.execution, prefill=way)
    case = replace(found.case, machine=there, wanted=wanted, execution=execution)
    return predict(replace(found, case=case))
