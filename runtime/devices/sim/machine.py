"""What a machine can do, as rates of its parts; every key names its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

OTHER = "default"
"""The key of formats that have no rates of their own."""


@dataclass(frozen=True)
class Kernel:
    """The rates of a format's kernels, of all cores or of one GPU.

    A product takes as long as reading its weights, or as decoding them and multiplying, whichever
    is longer; of few rows by the kernel of one row, of others by that of many.

    Attributes:
        tflops: 1e12 operations a second of products of many rows; ``rows_gweights_s``: 1e9 weights
            a second that are decoded for them; None: as for one row.
        decode_gweights_s: 1e9 weights a second that are decoded and multiplied with one row;
            ``few_tflops``: 1e12 operations a second with the other rows; None: as of many.
        gemm_from: rows from which the kernel of many is taken.
    """

    tflops: float
    decode_gweights_s: float = 1e6
    rows_gweights_s: float | None = None
    few_tflops: float | None = None
    gemm_from: int = 5

    def seconds(self, weights: float, flops: float) -> float:
        """Seconds that decoding so many weights takes, and multiplying them in so many FLOPs."""
        rows = flops / max(1.0, 2 * weights)
        one = weights / (self.decode_gweights_s * 1e9)
        if rows <= 1:
            return one
        decode = self.rows_gweights_s or self.decode_gweights_s
        many = weights / (decode * 1e9) + flops / (self.tflops * 1e12)
        if self.few_tflops is None or rows >= self.gemm_from:
            return many
        return one + (flops - 2 * weights) / (self.few_tflops * 1e12)

    def times(self, factor: float) -> Kernel:
        """So many times as fast."""
        return replace(
            self,
            tflops=self.tflops * factor,
            decode_gweights_s=self.decode_gweights_s * factor,
            rows_gweights_s=self.rows_gweights_s and self.rows_gweights_s * factor,
            few_tflops=self.few_tflops and self.few_tflops * factor,
        )


@dataclass(frozen=True)
class Cpu:
    """Cores and main memory.

    Attributes:
        cores: that compute; ``memory_gib``: of all sockets.
        read_gbps: 1e9 bytes a second that all cores read at once, plain loops; ``experts_share``:
            of it that the kernels of experts reach, ``linear_share``: all others.
        contended_gbps: that the cores and the links to GPUs read at once, together; None: as much
            as the cores alone.
        sockets: NUMA nodes; ``cross_gbps``: 1e9 bytes a second that one of them reads from another.
        job_us: handing one node to all workers and meeting them again.
        attention_tflops: 1e12 operations a second of attention; ``latent_attention_tflops``: where
            all heads of a token read one latent key (MLA), which is a product of many rows.
        kernels: rates by format of the weights.
    """

    cores: int
    memory_gib: float
    read_gbps: float
    kernels: Mapping[str, Kernel]
    attention_tflops: float
    latent_attention_tflops: float
    job_us: float = 5.0
    experts_share: float = 0.9
    linear_share: float = 0.75
    contended_gbps: float | None = None
    sockets: int = 1
    cross_gbps: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One of the GPUs, all alike, and its link to main memory.

    Attributes:
        count: how many; ``memory_gib``: of each.
        read_gbps, kernels, and those of attention: as of ``Cpu``.
        experts_share, linear_share: likewise; what else a kernel takes is ``launch_us``.
        attention_share: likewise of keys and values; ``fp8_latents_gnumbers_s``: 1e9 numbers of
            latents a second that are decoded from FP8 before heads multiply them; None: for
            nothing.
        launch_us: from the end of a kernel to the begin of the next in a CUDA graph, and what a
            kernel takes that reads next to nothing.
        host_us: that Python and the driver take to launch a kernel, where no CUDA graph does.
        uncaptured_us: likewise in steps of ours that no graph has, since what they launch depends
            on their sequences.
        hop_us: to the CPU's workers and back, at flags, with 28 KiB each way.
        link_gbps: 1e9 bytes a second from main memory, and as many to it at once.
        peer_gbps: from another GPU; None: what it sends goes through main memory.
        peer_us: to another GPU and back, at flags.
    """

    name: str
    memory_gib: float
    read_gbps: float
    kernels: Mapping[str, Kernel]
    attention_tflops: float
    link_gbps: float
    count: int = 1
    experts_share: float = 0.86
    linear_share: float = 0.86
    attention_share: float = 0.93
    latent_attention_tflops: float | None = None
    fp8_latents_gnumbers_s: float | None = None
    launch_us: float = 3.6
    host_us: float = 0.0
    uncaptured_us: float = 0.0
    hop_us: float = 10.0
    peer_gbps: float | None = None
    peer_us: float = 10.0


@dataclass(frozen=True)
class Engine:
    """What Python does around each step.

    Attributes:
        step_us: of a decode step, while no device computes; ``prompt_us``: of a prompt's.
    """

    step_us: float = 60.0
    prompt_us: float = 1500.0


@dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
        source: of where its numbers are from.
        calibrated_on: runs of whole models from which constants were taken, and which: they tell
            nothing of how good predictions are.
    """

    name: str
    cpu: Cpu
    gpu: Gpu | None = None
    engine: Engine = field(default_factory=Engine)
    source: str = ""
    calibrated_on: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names by which plans have its GPUs: "cuda:0" ..."""
        return tuple(f"cuda:{i}" for i in range(self.gpu.count if self.gpu else 0))

    def interleaved(self) -> Machine:
        """The machine if weights are not sliced by socket: each reads a part of them in the memory
        of the others."""
        cpu = self.cpu
        if cpu.sockets == 1 or cpu.cross_gbps is None:
            return self
        own, n = cpu.read_gbps / cpu.sockets, cpu.sockets
        slower = 1 / n + (n - 1) / n * own / cpu.cross_gbps
        rate = cpu.read_gbps / slower
        return replace(self, cpu=replace(cpu, read_gbps=rate, contended_gbps=rate))

    def reading(self, gbps: float) -> Machine:
        """The machine if its cores read so many 1e9 bytes a second of main memory."""
        cpu, contended = self.cpu, self.cpu.contended_gbps
        if contended is not None:
            contended *= gbps / cpu.read_gbps
        return replace(self, cpu=replace(cpu, read_gbps=gbps, contended_gbps=contended))

    def with_threads(self, threads: int) -> Machine:
        """The machine if only so many cores compute: rates of computing are theirs, and of reading
        as many times one core's as memory allows."""
        part = min(1.0, threads / self.cpu.cores)
        kernels = {name: kernel.times(part) for name, kernel in self.cpu.kernels.items()}
        one_core = 2 * self.cpu.read_gbps / self.cpu.cores  # half of the cores read all there is
        return replace(
            self,
            cpu=replace(
                self.cpu,
                cores=min(threads, self.cpu.cores),
                kernels=kernels,
                read_gbps=min(self.cpu.read_gbps, one_core * threads),
                attention_tflops=self.cpu.attention_tflops * part,
                latent_attention_tflops=self.cpu.latent_attention_tflops * part,
            ),
        )


def kernel_of(kernels: Mapping[str, Kernel], fmt: str) -> Kernel:
    """The rates of a format; those of "default" where it has none of its own."""
    return kernels.get(fmt) or kernels[OTHER]
