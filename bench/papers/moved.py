"""Machines that are moved to: what is calibrated on one class of hardware is taken to another, of
which its roofs alone are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from model.planner.machines import find_machine
from runtime.devices.sim.classes import cpu_of, gpu_of
from runtime.devices.sim.machine import Cpu, Gpu, Machine

from .compared import Compared

PAIRS = (
    ("xeon-amx-2-cores", "zen2-2-cores"),
    ("zen2-2-cores", "xeon-amx-2-cores"),
    ("xeon-amx-2-cores", "h200-16-cores"),
    ("h200-16-cores", "h100-16-cores"),
    ("h200-16-cores", "h200-x2-32-cores"),
)
"""Calibrated on, and moved to; without a GPU on the one, runs of the CPU alone."""
KINDS = {"zen2-2-cores": "avx2"}
"""Instructions of machines; "amx" of all others."""
TARGET = 0.12
"""Median error that is aimed at."""


def moved(known: str, there: str) -> Machine:
    """A machine with its own roofs (cores, memory, links, GPUs as published) and all else as it was
    calibrated on another one; where instructions differ, with the kernels of their class."""
    source, target = find_machine(known), find_machine(there)
    cpu = _cpu(source.cpu, target.cpu, KINDS.get(known, "amx"), KINDS.get(there, "amx"))
    gpu = None
    if source.gpu is not None and target.gpu is not None:
        gpu = _gpu(source.gpu, target.gpu)
    return Machine(f"{target.name}, as {source.name}", cpu, gpu, source.engine)


def _cpu(source: Cpu, target: Cpu, kind: str, other: str) -> Cpu:
    part = target.cores / source.cores
    own, there = (
        cpu_of(name, target.cores, target.memory_gib, target.read_gbps) for name in (kind, other)
    )
    attention = part * there.attention_tflops / own.attention_tflops
    kernels = {name: kernel.times(part) for name, kernel in source.kernels.items()}
    return replace(
        source,
        cores=target.cores,
        memory_gib=target.memory_gib,
        read_gbps=target.read_gbps,
        contended_gbps=target.contended_gbps,
        sockets=target.sockets,
        cross_gbps=target.cross_gbps,
        kernels=kernels if kind == other else there.kernels,
        attention_tflops=source.attention_tflops * attention,
        latent_attention_tflops=source.latent_attention_tflops * attention,
    )


def _gpu(source: Gpu, target: Gpu) -> Gpu:
    """The target as published, with what kernels reach of it, and launches, as of the source."""
    published = gpu_of(target.name, target.memory_gib, target.count)
    same = gpu_of(source.name, source.memory_gib)
    part = published.attention_tflops / same.attention_tflops
    reading = published.read_gbps / same.read_gbps
    return replace(
        source,
        name=target.name,
        memory_gib=target.memory_gib,
        count=target.count,
        read_gbps=source.read_gbps * reading,
        link_gbps=source.link_gbps * published.link_gbps / same.link_gbps,
        peer_gbps=target.peer_gbps,
        attention_tflops=source.attention_tflops * part,
        kernels={name: kernel.times(part) for name, kernel in source.kernels.items()},
    )


def median_error(found: Sequence[Compared]) -> float:
    """The median error."""
    return median(abs(each.error) for each in found) if found else 0.0
