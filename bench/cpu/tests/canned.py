"""A run's results as ``bench.cpu`` keeps them, small and made up."""

from __future__ import annotations

from typing import Any


def canned() -> dict[str, Any]:
    """One format, one case, ours and two peers, one of them missing."""
    head = {"format": "fp8", "tokens": 1, "threads": 2}
    roofs = {"read_roof": 50.0, "compute_roof": 1.0}
    ours = {
        **head, **roofs, "engine": "pykernels", "backend": "avx512", "us": 9000.0, "gbps": 40.0,
        "tflops": 0.08, "read_share": 0.8, "compute_share": 0.08,
        "ratios": {"kt-kernel fp8": 2.5, "torch bf16": 1.25},
    }  # fmt: skip
    torch = {
        **head, **roofs, "engine": "torch", "backend": "bf16", "threads": 1, "us": 11250.0,
        "gbps": 25.0, "tflops": 0.064, "read_share": 0.5, "compute_share": None,
    }  # fmt: skip
    gone = {**head, "engine": "kt-kernel", "backend": "bf16", "why": "not installed [at all]"}
    latency = [
        {"format": "fp8", "backend": "avx512", "per_expert": n, "tokens": 4 * n, "ms": 5.0 * n}
        for n in (1, 2)
    ]
    threads = [
        {"format": "fp8", "engine": "pykernels", "threads": n, "gbps": 20.0 * n, "read_roof": 25.0}
        for n in (1, 2)
    ]
    skew = {
        "format": "fp8", "backend": "avx512", "tokens": 512, "topk": 2, "experts": 16,
        "threads": 2, "routing": "zipf", "schedule": "static", "active": 15.5, "busiest": 3.9,
        "ms": 150.0, "against_balanced": 1.31, "against_balanced_a_byte": 1.35,
    }  # fmt: skip
    few = skew | {
        "tokens": 8, "schedule": "dynamic", "active": 10.0, "busiest": 2.0, "ms": 9.0,
        "against_balanced": 0.7, "against_balanced_a_byte": 1.02,
    }  # fmt: skip
    return {
        "schema": 4,
        "machine": {
            "date": "2031-02-03 04:05 UTC",
            "cpu": "Some CPU (arch9)",
            "cores": 4,
            "slug": "some-cpu-arch9-4-cores",
            "isa": ["avx2"],
            "l3_bytes": 32 << 20,
            "memory_bytes": 24 << 30,
            "huge_pages": "madvise",
            "load_before": 0.25,
            "minutes": 8.5,
            "versions": {"numba": "0.1", "kt-kernel (peer)": "0.7.2"},
        },
        "shape": {"E": 16, "H": 7168, "I": 2048, "topk": 8},
        "fewer_experts": "16 experts: 32 are 18.4 GiB",
        "settings": {
            "formats": ["fp8"],
            "sections": ["table", "skew", "latency", "threads"],
            "threads": 2,
            "quick": True,
        },
        "missing": {"why": "", "parts": []},
        "untimed": ["amx: this CPU lacks amx-tile"],
        "disturbed": [("fp8: threads", 0.25)],
        "table": [ours, torch, gone],
        "latency": latency,
        "threads": threads,
        "skew": [skew, few],
    }
