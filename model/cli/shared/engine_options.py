"""What `--device` and its kin are to `load_engine`, for every command that loads an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

from .session import check_experts, check_prefill, dense_gib_of, dual_batch_of, expert_cache_of


def engine_options(
    *,
    device: str = "cpu",
    rules: Path | None = None,
    experts: str = "auto",
    gpu_experts: str | None = None,
    prefill: str = "auto",
    dense_gib: str = "auto",
    expert_cache: str = "off",
    expert_cache_policy: str = "lfu",
    dual_batch: str = "off",
    defer: str | None = None,
    kv_dtype: str = "bf16",
) -> dict[str, Any]:
    """The arguments of ``load_engine``, before anything is loaded.

    Args:
        rules: they may name a GPU, too.
        defer: None: what rules say, or none.

    Raises:
        PykernelsError: a choice that there is not, or not on this device.
    """
    check_experts(experts, gpu_experts, device != "cpu" or rules is not None)
    if defer not in (None, "auto", "off") and not defer.isdecimal():
        raise PykernelsError(f"--defer {defer}", "Give a number of experts, auto or off")
    check_prefill(prefill, device)
    return {
        "device": device,
        "rules": rules,
        "experts": experts,
        "gpu_experts": gpu_experts,
        "prefill": prefill,
        "dense_gib": dense_gib_of(dense_gib, device),
        "expert_cache": expert_cache_of(expert_cache, device),
        "expert_cache_policy": expert_cache_policy,
        "dual_batch": dual_batch_of(dual_batch, device),
        "defer": defer,
        "kv_dtype": kv_dtype,
    }
