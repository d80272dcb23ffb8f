"""Rates of classes of hardware, by one core or one GPU, for a machine of which no more is known.

They are those of this repository's committed runs of kernels: 16 cores with AMX, two of Zen 5 with
AVX-512, two of Zen 2 with AVX2 (``bench/results``); of GPUs those of an H200, times the published
roofs of the others over its own.
"""

from __future__ import annotations

from types import MappingProxyType

from .machine import OTHER, Cpu, Gpu, Kernel

_PER_CORE: dict[str, dict[str, tuple[float, float]]] = {
    "amx": {
        OTHER: (13.8, 0.56),
        "bf16": (1e6, 0.8),
        "fp8": (12.5, 0.7),
        "int4-g128": (17.5, 0.84),
        "mxfp4": (16.0, 0.74),
        "q4_k": (12.2, 0.33),
        "q5_k": (12.0, 0.42),
        "q6_k": (12.0, 0.45),
        "q8_0": (13.8, 0.58),
    },
    "avx512": {OTHER: (55.0, 0.35), "bf16": (1e6, 0.35), "fp8": (40.0, 0.38), "q6_k": (40.0, 0.25)},
    "avx2": {OTHER: (20.0, 0.085), "bf16": (1e6, 0.085), "q4_k": (16.5, 0.085)},
    "generic": {OTHER: (0.6, 0.004)},
}
"""By class and format: 1e9 weights a second that are decoded for many rows, TFLOP/s."""

_H200 = {
    OTHER: (3900.0, 2700.0, 650.0),
    "bf16": (1e6, 1e6, 640.0),
    "fp8": (3360.0, 2900.0, 640.0),
    "int4-g128": (6600.0, 4900.0, 650.0),
    "q4_k": (3990.0, 2700.0, 700.0),
    "q6_k": (3200.0, 2400.0, 600.0),
}
_ROOFS = {  # GB/s, bf16 TFLOP/s, link GB/s: published
    "H200": (4578.0, 678.0, 54.5),
    "H100": (3350.0, 678.0, 54.5),
    "B200": (8000.0, 2250.0, 54.5),
    "A100": (1555.0, 312.0, 25.0),
    "L40": (864.0, 181.0, 25.0),
    "RTX 5090": (1792.0, 209.0, 52.0),
    "RTX 4090": (1008.0, 165.0, 25.0),
    "RTX 4080": (717.0, 97.0, 25.0),
    "RTX 3090": (936.0, 71.0, 25.0),
}
TYPICAL = "RTX 4090"
"""What a GPU counts as that nobody knows."""


def cpu_of(kind: str, cores: int, memory_gib: float, read_gbps: float) -> Cpu:
    """A CPU of a class: "amx", "avx512", "avx2" or "generic"."""
    kernels = {
        fmt: Kernel(tflops=tflops * cores, rows_gweights_s=decode * cores)
        if kind in ("amx", "avx512")
        else Kernel(tflops=tflops * cores, decode_gweights_s=decode * cores)
        for fmt, (decode, tflops) in _PER_CORE[kind].items()
    }
    attention = cores * {"amx": 0.022, "avx512": 0.04, "avx2": 0.025}.get(kind, 0.003)
    return Cpu(
        cores=cores,
        memory_gib=memory_gib,
        read_gbps=read_gbps,
        kernels=MappingProxyType(kernels),
        attention_tflops=attention,
        latent_attention_tflops=3 * attention,
    )


def gpu_of(name: str, memory_gib: float, count: int = 1) -> Gpu:
    """A GPU by its name, as CUDA says it."""
    known = next((key for key in _ROOFS if key in name), TYPICAL)
    read, tflops, link = _ROOFS[known]
    part = tflops / _ROOFS["H200"][1]
    kernels = {
        fmt: Kernel(
            decode_gweights_s=one * part,
            rows_gweights_s=more * part,
            tflops=rate * part,
        )
        for fmt, (one, more, rate) in _H200.items()
    }
    return Gpu(
        name=name,
        memory_gib=memory_gib,
        count=count,
        read_gbps=read,
        link_gbps=link,
        uncaptured_us=119,
        attention_tflops=640 * part,
        latent_attention_tflops=600 * part,
        fp8_latents_gnumbers_s=2100 * part,
        kernels=MappingProxyType(kernels),
    )
