"""The machine that is planned for: a file, one of the repository's, or this one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from pykernels.errors import PykernelsError
from pykernels.target import detect
from runtime.devices.gpus import free_bytes, gpus_of, usable_gpus
from runtime.devices.sim.classes import cpu_of, gpu_of
from runtime.devices.sim.machine import Machine
from runtime.machine.topology import Topology
from runtime.profiling import roofline
from runtime.workers.pool import WorkerPool, make_pool

from .machine_file import read_machine

_NEEDS = {"amx": {"amx-tile", "amx-bf16"}, "avx512": {"avx512bw", "avx512vl"}, "avx2": {"avx2"}}


def shipped() -> dict[str, Path]:
    """By name, the files of bench/machines, where there is that folder."""
    found = importlib.util.find_spec("bench")
    folders = [
        Path(place) / "machines" for place in (found and found.submodule_search_locations) or ()
    ]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def find_machine(given: str | None, threads: int | None = None) -> Machine:
    """A machine by its file or its name; None: this one, by what is measured and known of it.

    Args:
        threads: that compute on this one; None: as many as by default.

    Raises:
        PykernelsError: there is none of that name; what is wrong with its file.
    """
    if given is None:
        return this_machine(threads)
    path = Path(given)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        known = shipped()
        if given not in known:
            hint = (
                f"Give a YAML file, or one of {', '.join(known)}" if known else "Give a YAML file"
            )
            raise PykernelsError(f"There is no machine {given!r}", hint)
        path = known[given]
    return read_machine(path)


def this_machine(threads: int | None = None, pool: WorkerPool | None = None) -> Machine:
    """This computer: its read roof as measured (once a day), rates of its class of CPU, and what is
    known of its GPUs, with the memory of them that is free now.

    Args:
        threads: that compute; None: as many as by default.
        pool: of so many threads, which reads; None: one that is made for it.
    """
    topology, target = Topology.detect(), detect()
    threads = threads or topology.default_threads()
    kinds = [name for name in _NEEDS if target.isa.issuperset(_NEEDS[name])]
    cpu = cpu_of(
        kinds[0] if kinds else "generic",
        threads,
        topology.memory_total / 2**30,
        _read_roof(threads) if pool is None else roofline.kept_read_roof(threads, lambda: pool),
    )
    cpu = replace(cpu, sockets=len(topology.nodes) or 1)
    gpu = None
    if names := usable_gpus():
        free = min(free_bytes(gpus_of(",".join(names))).values())
        gpu = gpu_of(torch.cuda.get_device_name(0), free / 2**30, len(names))
    return Machine(name=f"this machine ({target.cpu})", cpu=cpu, gpu=gpu)


def _read_roof(threads: int) -> float:
    """GB/s that so many threads read."""
    pools: list[WorkerPool] = []

    def pool() -> WorkerPool:
        pools.append(make_pool(threads))
        return pools[0]

    try:
        return roofline.kept_read_roof(threads, pool)
    finally:
        for made in pools:
            made.close()
