"""A model on a paper's machine: the simulated steps that cells are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from model.inspection.subject import open_subject
from model.planner.machines import find_machine
from model.planner.placing import Placed, placed
from model.planner.predict import Prediction, balanced_share, predict
from model.planner.settings import Case, Wanted
from runtime.devices.sim.cost import Load
from runtime.devices.sim.machine import Machine
from runtime.devices.sim.meetings import MEETS
from runtime.devices.sim.routing import Routing
from runtime.devices.sim.step import SimulatedStep, simulate
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import Phase
from runtime.planning.placement import CPU

LAYERS = 20
"""Of a model, of which steps are simulated; the others count as these."""
FEW = 32000
EVEN = Routing()


@dataclass(frozen=True)
class System:
    """What a paper's program does otherwise than ours, by the paper's own text.

    Attributes:
        launches: kernels on the GPU a layer; None: as many as ours.
        host_us: of each, where no CUDA graph launches them.
    """

    launches: float | None = None
    host_us: float = 0.0

    def on(self, machine: Machine, ours: float) -> Machine:
        """The machine on which a program of ours launches as much as this one.

        Args:
            ours: kernels of a layer of our program.
        """
        assert machine.gpu is not None
        times = 1.0 if self.launches is None else self.launches / ours
        gpu = replace(
            machine.gpu,
            launch_us=machine.gpu.launch_us * times,
            host_us=self.host_us * times,
        )
        return replace(machine, gpu=gpu)


OURS = System()


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
) -> Placed:
    run = ExecutionConfig(
        device="cuda:0", experts="cpu", defer=defer or None, dual_batch=dual and batch > 1
    )
    wanted = Wanted(positions, 1, batch, 1, step_tokens=step_tokens)
    there = find_machine(machine)
    found = placed(Case(open_subject(arch, fmt).thinned(LAYERS), _roomy(there), run, wanted))
    found = replace(found, case=replace(found.case, machine=there))
    return found.with_slots(slots) if slots else found


def _roomy(machine: Machine) -> Machine:
    """The machine with GPU memory for whatever a paper's program keeps there by its own means."""
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, memory_gib=1 << 12))


def run(
    arch: str,
    fmt: str,
    machine: str,
    *,
    system: System = OURS,
    prompt: int = 32,
    context: int = 300,
    batch: int = 1,
    defer: int = 0,
    dual: bool = False,
    slots: int = 0,
    way: str = "auto",
    routing: Routing = EVEN,
    change: Callable[[Machine], Machine] = lambda machine: machine,
) -> Prediction:
    """Decoding and a prompt.

    Args:
        machine: its name in bench/machines; ``change``: makes it another one.
        system: whose launches they are.
        way: of a prompt's experts, see ``ExecutionConfig.prefill``.
    """
    positions = 1 << (max(prompt, context) - 1).bit_length()
    tokens = 8192 if way == "cpu" else None  # the papers' programs read such prompts at once
    found = _placed(arch, fmt, machine, defer, batch, dual, positions, slots, tokens)
    there = change(system.on(found.case.machine, _launches(found, batch)))
    wanted = replace(found.case.wanted, context=context, prompt=prompt, routing=routing)
    execution = replace(found.case.execution, prefill=way)
    case = replace(found.case, machine=there, wanted=wanted, execution=execution)
    return predict(replace(found, case=case))


def decoding(
    arch: str,
    fmt: str,
    machine: str,
    *,
    system: System = OURS,
    context: int = 300,
    batch: int = 1,
    dual: bool = False,
    beside_gbps: float = 0.0,
) -> SimulatedStep:
    """A step of ``run`` beside something else that reads so many 1e9 bytes of main memory a
    second."""
    positions = 1 << (context - 1).bit_length()
    found = _placed(arch, fmt, machine, 0, batch, dual, positions, 0, None)
    there = system.on(found.case.machine, _launches(found, batch))
    load = Load(batch, context, batch)
    step = simulate(found.compiled(Phase.DECODE, batch), there, load, beside_gbps)
    return step.stretched(found.case.subject.stretch)


def _launches(found: Placed, batch: int) -> float:
    """Kernels of our program on the GPU in a decode step of a layer."""
    (part,) = (
        part for name, part in found.compiled(Phase.DECODE, batch).parts.items() if name != CPU
    )
    own = [node for node in part.nodes if node.layer is not None and node.op not in MEETS]
    return len(own) / len(found.case.subject.decoder.layers)


@functools.lru_cache(maxsize=32)
def _streamed(
    arch: str, fmt: str, machine: str, tokens: int, gpus: int, exchange: str, layers: int | None
) -> Placed:
    run = ExecutionConfig(device="cuda:0", experts="cpu", prefill="stream")
    wanted = Wanted(tokens, tokens - 1, 1, 1, step_tokens=tokens)
    there = find_machine(machine)
    # OSDI'26 3.1 keeps a layer's experts and its own dense weights alone: a prompt is one step.
    subject = open_subject(arch, fmt, layers=layers, vocab=layers and FEW).thinned(LAYERS)
    found = placed(Case(subject, _roomy(there), run, wanted))
    assert found.plan.streaming is not None
    over = there.gpus[:gpus] if gpus > 1 else ()
    streaming = replace(found.plan.streaming, exchange=exchange)
    plan = replace(found.plan, streaming=streaming, stream_over=over)
    return replace(found, plan=plan, case=replace(found.case, machine=there), programs={})


def crossing(arch: str, fmt: str, machine: str, tokens: int, routing: Routing) -> float:
    """The share of a layer's experts that crosses in a prompt, so that the link takes as long as
    the CPU does for the others."""
    found = _streamed(arch, fmt, machine, tokens, 1, "small_ep", None)
    wanted = replace(found.case.wanted, routing=routing)
    return balanced_share(replace(found, case=replace(found.case, wanted=wanted)), tokens)


def streamed(
    arch: str,
    fmt: str,
    machine: str,
    tokens: int,
    *,
    gpus: int = 1,
    exchange: str = "small_ep",
    beside_gbps: float = 0.0,
    system: System = OURS,
    share: float | None = 1.0,
    routing: Routing = EVEN,
    layers: int | None = None,
) -> SimulatedStep:
    """A prompt that is one step, whose experts cross to one GPU or to several.

    Args:
        exchange: of ``passes.shard.EXPERTS``.
        beside_gbps: that something else reads of main memory meanwhile.
        share: of each layer's experts that cross, the most used ones; the CPU computes the others.
            None: as many as ``crossing`` says.
        layers: of a model of fewer, with ``FEW`` tokens in its vocabulary, as runs of ours have.
    """
    found = _streamed(arch, fmt, machine, tokens, gpus, exchange, layers)
    if share is None:
        share = crossing(arch, fmt, machine, tokens, routing)
    split = {1.0: Phase.STREAMED, 0.0: Phase.PROMPT}.get(share, Phase.SPLIT)
    compiled = found.compiled(split, tokens, share if split is Phase.SPLIT else 0.0)
    there = system.on(found.case.machine, _launches(found, 1))
    step = simulate(compiled, there, Load(tokens, tokens // 2, 1, routing), beside_gbps)
    return step.stretched(found.case.subject.stretch)
