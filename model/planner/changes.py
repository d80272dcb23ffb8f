"""What would make a case faster: each change is predicted as the case itself was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pykernels.errors import PykernelsError
from runtime.devices.sim.machine import Machine
from runtime.passes.layers import moe_layers
from runtime.planning.placement import CPU

from ..checkpoint.memory import weight_bytes
from .placing import Placed
from .predict import Prediction, predict

MOST = 3
LAYERS = 8
"""Of the model, by which gains are predicted: lowering all takes seconds."""
LEAST = 1.02
"""A change that gains less is not worth a line."""
SMALLER = {"bf16": ("fp8", "q4_k"), "fp8": ("q4_k",), "q8_0": ("q4_k",), "q4_k": ("iq4_xs", "q3_k")}
"""By format, those that are tried in its place."""


@dataclass(frozen=True)
class Change:
    """A change and what it gains.

    Attributes:
        gain: times as fast, of a whole request; ``decode``, ``prompt``: of these alone.
    """

    text: str
    gain: float
    decode: float
    prompt: float


def changes(found: Prediction) -> list[Change]:
    """The changes that gain most, the best first."""
    case = found.placed.case
    thin = replace(case, subject=case.subject.thinned(LAYERS))
    now = replace(found.placed, case=thin, programs={})
    if now.plan.placement.by_layer:  # layers are dealt by their numbers
        now = found.placed
    before, made = predict(now), []
    for text, there in _changed(now):
        try:
            new = predict(there)
        except PykernelsError:  # a format whose blocks the model's widths do not fill
            continue
        made.append(
            Change(
                text,
                before.request_s / new.request_s,
                new.decode_tok_s / before.decode_tok_s,
                new.prompt.tok_s / before.prompt.tok_s,
            )
        )
    made.sort(key=lambda change: -change.gain)
    return [change for change in made if change.gain >= LEAST][:MOST]


def _changed(now: Placed) -> Iterator[tuple[str, Placed]]:
    case = now.case
    subject, run = case.subject, case.execution
    for fmt in SMALLER.get(subject.fmt, ()):
        saved = 1 - weight_bytes(fmt) / weight_bytes(subject.fmt)
        smaller = replace(case, subject=subject.in_format(fmt))
        text = f"{fmt} weights ({saved:.0%} smaller)"
        yield text, replace(now, case=smaller, programs={})
    if run.kv_dtype == "bf16" and case.wanted.context >= 4096:
        smaller = replace(case, subject=subject.with_cache("fp8"))
        yield "--kv-dtype fp8", replace(now, case=smaller, programs={})
    yield "twice the memory channels", _on(now, _cpu(case.machine, 2.0, 1.0))
    yield "twice the cores", _on(now, _cpu(case.machine, 1.0, 2.0))
    if run.on_gpu and now.plan.placement.experts == CPU:
        yield from _beside_a_gpu(now)


def _on(now: Placed, machine: Machine) -> Placed:
    """The same plan and programs on another machine."""
    return replace(now, case=replace(now.case, machine=machine))


def _beside_a_gpu(now: Placed) -> Iterator[tuple[str, Placed]]:
    case, gpu = now.case, now.case.machine.gpu
    assert gpu is not None
    faster = replace(gpu, link_gbps=2 * gpu.link_gbps)
    yield "a link twice as fast", _on(now, replace(case.machine, gpu=faster))
    program = case.subject.decoder.lower()
    layers = moe_layers(program)
    if not now.plan.deferred and not case.slots:
        plan = replace(now.plan, deferred=2)
        deferring = replace(now, plan=plan, programs={})
        yield "--defer 2 (another text)", deferring
    if not case.slots and not now.plan.deferred and layers and len(case.machine.gpus) == 1:
        spec = program.weight(layers[0].experts, "experts")
        count = round(len(layers) * case.subject.stretch)
        slots = min(spec.shape[0] // 2, now.room // (count * spec.bytes_per_expert))
        if slots > 0:
            yield f"--expert-cache {slots}", now.with_slots(slots)


def _cpu(machine: Machine, memory: float, cores: float) -> Machine:
    """The machine with so many times the memory's rates, and the cores' own."""
    cpu = machine.cpu
    kernels = {name: kernel.times(cores) for name, kernel in cpu.kernels.items()}
    contended = cpu.contended_gbps and cpu.contended_gbps * memory
    changed = replace(
        cpu,
        read_gbps=cpu.read_gbps * memory,
        contended_gbps=contended,
        kernels=kernels,
        attention_tflops=cpu.attention_tflops * cores,
        latent_attention_tflops=cpu.latent_attention_tflops * cores,
    )
    return replace(machine, cpu=changed)
