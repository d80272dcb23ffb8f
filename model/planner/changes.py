"""What would make a case faster: each change is predicted as the case itself was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pykernels.errors import PykernelsError
from runtime.devices.sim.machine import Machine
from runtime.passes.layers import moe_layers
from runtime.planning.placement import CPU

from ..random_model import weight_bytes
from .placing import placed
from .predict import Prediction, predict
from .settings import Case

MOST = 3
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
    made = []
    for case in _cases(found):
        try:
            there = placed(case)
        except PykernelsError:  # an option that this model or device has not
            continue
        if there.fits:
            new = predict(there)
            made.append(
                Change(
                    case.changed,
                    found.request_s / new.request_s,
                    new.decode_tok_s / found.decode_tok_s,
                    new.prompt.tok_s / found.prompt.tok_s,
                )
            )
    made.sort(key=lambda change: -change.gain)
    return [change for change in made if change.gain >= LEAST][:MOST]


def _cases(found: Prediction) -> Iterator[Case]:
    case = found.placed.case
    machine, subject, run = case.machine, case.subject, case.execution
    for fmt in SMALLER.get(subject.fmt, ()):
        saved = 1 - weight_bytes(fmt) / weight_bytes(subject.fmt)
        yield replace(
            case, subject=subject.in_format(fmt), changed=f"{fmt} weights ({saved:.0%} smaller)"
        )
    if run.kv_dtype == "bf16" and case.wanted.context >= 4096:
        yield replace(
            case,
            subject=subject.with_cache("fp8"),
            execution=replace(run, kv_dtype="fp8"),
            changed="--kv-dtype fp8",
        )
    yield replace(case, machine=_cpu(machine, 2.0, 1.0), changed="twice the memory channels")
    yield replace(case, machine=_cpu(machine, 1.0, 2.0), changed="twice the cores")
    if run.on_gpu and found.placed.plan.placement.experts == CPU:
        yield from _beside_a_gpu(found)


def _beside_a_gpu(found: Prediction) -> Iterator[Case]:
    case = found.placed.case
    gpu, program = case.machine.gpu, case.subject.decoder.lower()
    assert gpu is not None
    faster = case.machine.model_copy(
        update={"gpu": gpu.model_copy(update={"link_gbps": 2 * gpu.link_gbps})}
    )
    yield replace(case, machine=faster, changed="a link twice as fast")
    if not case.execution.defer:
        yield replace(
            case,
            execution=replace(case.execution, defer=2),
            changed="--defer 2 (another text)",
        )
    layers = moe_layers(program)
    if not case.slots and layers and len(case.execution.device.split(",")) == 1:
        spec = program.weight(layers[0].experts, "experts")
        slots = min(spec.shape[0] // 2, found.placed.room // (len(layers) * spec.bytes_per_expert))
        if slots > 0:
            text = f"--expert-cache {slots}"
            yield replace(case, slots=int(slots), changed=text)


def _cpu(machine: Machine, memory: float, cores: float) -> Machine:
    """The machine with so many times the memory's rates, and the cores' own."""
    cpu = machine.cpu
    kernels = {
        name: kernel.model_copy(
            update={
                "tflops": kernel.tflops * cores,
                "decode_gweights_s": kernel.decode_gweights_s * cores,
                "rows_gweights_s": kernel.rows_gweights_s and kernel.rows_gweights_s * cores,
            }
        )
        for name, kernel in cpu.kernels.items()
    }
    change = {
        "read_gbps": cpu.read_gbps * memory,
        "contended_gbps": cpu.contended_gbps and cpu.contended_gbps * memory,
        "kernels": kernels,
        "attention_tflops": cpu.attention_tflops * cores,
    }
    return machine.model_copy(update={"cpu": cpu.model_copy(update=change)})
