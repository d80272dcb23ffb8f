"""This computer as a machine of rates: what is measured of it, and what is known of its class."""

from __future__ import annotations

from dataclasses import replace

import torch

from pykernels.target import detect

from ..devices.sim.classes import cpu_of, gpu_of
from ..devices.sim.machine import Machine
from ..machine.topology import Topology
from ..workers.pool import make_pool
from .roofline import kept_read_roof

_NEEDS = {"amx": {"amx-tile", "amx-bf16"}, "avx512": {"avx512bw", "avx512vl"}, "avx2": {"avx2"}}


def this_machine() -> Machine:
    """This computer: its read roof as measured (once a day), rates of its class of CPU, and what is
    known of its GPUs."""
    topology, target = Topology.detect(), detect()
    threads = topology.default_threads()
    kinds = [name for name in _NEEDS if target.isa.issuperset(_NEEDS[name])]
    cpu = cpu_of(
        kinds[0] if kinds else "generic",
        threads,
        topology.memory_total / 2**30,
        kept_read_roof(threads, lambda: make_pool(threads)),
    )
    cpu = replace(cpu, sockets=len(topology.nodes) or 1)
    gpu = None
    if torch.cuda.device_count():
        about = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        gpu = gpu_of(about.name, about.total_memory / 2**30, count)
    return Machine(name=f"this machine ({target.cpu})", cpu=cpu, gpu=gpu)
