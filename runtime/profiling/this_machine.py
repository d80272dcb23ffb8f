"""This computer as a machine of rates: what is measured of it, and what is known of its class."""

from __future__ import annotations

from dataclasses import replace

import torch

from pykernels.target import detect

from ..devices.gpus import free_bytes, gpus_of, usable_gpus
from ..devices.sim.classes import cpu_of, gpu_of
from ..devices.sim.machine import Machine
from ..machine.topology import Topology
from ..workers.pool import WorkerPool, make_pool
from . import roofline

_NEEDS = {"amx": {"amx-tile", "amx-bf16"}, "avx512": {"avx512bw", "avx512vl"}, "avx2": {"avx2"}}


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
