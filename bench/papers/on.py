"""A model on a paper's machine: the simulated steps that cells are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from model.planner.machines import find_machine
from model.planner.placing import Placed, placed
from model.planner.predict import Prediction, predict
from model.planner.settings import Case, Wanted
from model.planner.subject import open_subject
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
    streamed = way == "stream"
    tokens = 8192 if way == "cpu" else None  # the papers' programs read such prompts at once
    options = defer, batch, dual, positions, slots
    found = _placed(arch, fmt, machine, *options, tokens, streamed)
    there = change(system.on(found.case.machine, _launches(found, batch)))
    wanted = replace(found.case.wanted, context=context, prompt=prompt, routing=routing)
    execution = replace(found.case.execution, prefill=way)
    case = replace(found.case, machine=there, wanted=wanted, execution=execution)
    return predict(replace(found, case=case))


def _launches(found: Placed, batch: int) -> float:
    """Kernels of our program on the GPU in a decode step of a layer."""
    (part,) = (
        part for name, part in found.compiled(Phase.DECODE, batch).parts.items() if name != CPU
    )
    own = [node for node in part.nodes if node.layer is not None and node.op not in MEETS]
    return len(own) / len(found.case.subject.decoder.layers)


@functools.lru_cache(maxsize=32)
def _streamed(arch: str, fmt: str, machine: str, tokens: int, gpus: int, exchange: str) -> Placed:
    run = ExecutionConfig(device="cuda:0", experts="cpu", prefill="stream")
    wanted = Wanted(tokens, tokens - 1, 1, 1, step_tokens=tokens)
    there = find_machine(machine)
    assert there.gpu is not None
    # OSDI'26 3.1 keeps a layer's experts and its own dense weights alone: a prompt is one step.
    roomy = replace(there, gpu=replace(there.gpu, memory_gib=1 << 12))
    found = placed(Case(open_subject(arch, fmt).thinned(LAYERS), roomy, run, wanted))
    assert found.plan.streaming is not None
    over = there.gpus[:gpus] if gpus > 1 else ()
    streaming = replace(found.plan.streaming, exchange=exchange)
    plan = replace(found.plan, streaming=streaming, stream_over=over)
    return replace(found, plan=plan, case=replace(found.case, machine=there), programs={})


def streamed(
    arch: str,
    fmt: str,
    machine: str,
    tokens: int,
    *,
    gpus: int = 1,
    exchange: str = "small_ep",
    beside_gbps: float = 0.0,
) -> SimulatedStep:
    """A prompt that is one step, whose experts cross to one GPU or to several.

    Args:
        exchange: of ``passes.shard.EXPERTS``.
        beside_gbps: that something else reads of main memory meanwhile.
    """
    found = _streamed(arch, fmt, machine, tokens, gpus, exchange)
    compiled = found.compiled(Phase.STREAMED, tokens)
    load = Load(tokens, tokens // 2, 1)
    step = simulate(compiled, found.case.machine, load, beside_gbps)
    return step.stretched(found.case.subject.stretch)
