"""What a machine can do, as rates of its parts; every key names its unit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

OTHER = "default"
"""The key of formats that have no rates of their own."""

Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Kernel(_Part):
    """The rates of a format's kernels, of all cores or of one GPU.

    A product takes as long as reading its weights, or as decoding them and multiplying, whichever
    is longer.

    Attributes:
        decode_gweights_s: 1e9 weights a second that are brought from the format into registers;
            ``rows_gweights_s``: the same where they are multiplied with more than one row.
        tflops: 1e12 operations a second of products of many rows.
    """

    tflops: Rate
    decode_gweights_s: Rate = 1e9
    rows_gweights_s: Rate | None = None


class Cpu(_Part):
    """Cores and main memory.

    Attributes:
        cores: that compute; ``memory_gib``: of all sockets.
        read_gbps: 1e9 bytes a second that all cores read at once, plain loops; ``read_share``: of
            it that kernels of products reach.
        contended_gbps: that the cores and the links to GPUs read at once, together; None: as much
            as the cores alone.
        sockets: NUMA nodes; ``cross_gbps``: 1e9 bytes a second that one of them reads from another.
        job_us: handing one node to all workers and meeting them again.
        attention_tflops: 1e12 operations a second of attention.
        kernels: rates by format of the weights.
    """

    cores: Annotated[int, Field(ge=1)]
    memory_gib: Rate
    read_gbps: Rate
    kernels: Mapping[str, Kernel]
    attention_tflops: Rate
    job_us: Annotated[float, Field(ge=0)] = 10.0
    read_share: Share = 0.93
    contended_gbps: Rate | None = None
    sockets: Annotated[int, Field(ge=1)] = 1
    cross_gbps: Rate | None = None


class Gpu(_Part):
    """One of the GPUs, all alike, and its link to main memory.

    Attributes:
        count: how many; ``memory_gib``: of each.
        read_gbps, read_share, kernels, attention_tflops: as of ``Cpu``.
        launch_us: from the end of a kernel to the begin of the next in a CUDA graph, and what a
            kernel takes that reads next to nothing.
        hop_us: to the CPU's workers and back, at flags.
        link_gbps: 1e9 bytes a second from main memory.
    """

    name: str
    memory_gib: Rate
    read_gbps: Rate
    kernels: Mapping[str, Kernel]
    attention_tflops: Rate
    link_gbps: Rate
    count: Annotated[int, Field(ge=1)] = 1
    read_share: Share = 0.88
    launch_us: Annotated[float, Field(ge=0)] = 3.6
    hop_us: Annotated[float, Field(ge=0)] = 10.0


class Engine(_Part):
    """What Python does around each step.

    Attributes:
        step_us: of one, while no device computes.
    """

    step_us: Annotated[float, Field(ge=0)] = 100.0


class Machine(_Part):
    """A machine.

    Attributes:
        source: of where its numbers are from.
        calibrated_on: the committed rows from which constants were taken, as ``FILE: what``;
            whoever compares predictions with measurements leaves these out.
    """

    name: str
    cpu: Cpu
    gpu: Gpu | None = None
    engine: Engine = Engine()
    source: str = ""
    calibrated_on: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names by which plans have its GPUs: "cuda:0" ..."""
        return tuple(f"cuda:{i}" for i in range(self.gpu.count if self.gpu else 0))

    def with_threads(self, threads: int) -> Machine:
        """The machine if only so many cores compute: rates of computing are theirs, and of reading
        as many times one core's as memory allows."""
        part = min(1.0, threads / self.cpu.cores)
        kernels = {
            name: Kernel(
                tflops=kernel.tflops * part,
                decode_gweights_s=kernel.decode_gweights_s * part,
                rows_gweights_s=kernel.rows_gweights_s and kernel.rows_gweights_s * part,
            )
            for name, kernel in self.cpu.kernels.items()
        }
        one_core = 2 * self.cpu.read_gbps / self.cpu.cores  # half of the cores read all there is
        change = {
            "cores": min(threads, self.cpu.cores),
            "kernels": MappingProxyType(kernels),
            "read_gbps": min(self.cpu.read_gbps, one_core * threads),
            "attention_tflops": self.cpu.attention_tflops * part,
        }
        return self.model_copy(update={"cpu": self.cpu.model_copy(update=change)})


def kernel_of(kernels: Mapping[str, Kernel], fmt: str) -> Kernel:
    """The rates of a format; those of "default" where it has none of its own."""
    return kernels.get(fmt) or kernels[OTHER]
