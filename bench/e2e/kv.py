"""What keys and values in main memory cost a decode step: how near it comes to the link."""

from __future__ import annotations

from runtime.devices.cuda.link import link_rate
from runtime.kv_cache.layout import PAGE
from runtime.profiling.engine_speed import Load
from runtime.runner.paged_runner import PagedRunner


def kv_figures(runner: PagedRunner, load: Load, us_per_step: float) -> dict[str, float]:
    """Figures of a row: GiB of keys and values in main memory, the rate at which those of a step
    cross, the link's own, and the share of it; {} if all are on the GPU."""
    layers = runner.plan.placement.kv_in_main
    if not layers or runner.device.type != "cuda":
        return {}
    specs = runner.model.cache_specs  # type: ignore[attr-defined]
    row = sum(specs[layer].token_bytes for layer in layers)
    pages = -(-(load.context + load.tokens // 2) // PAGE)
    gbps = load.batch * pages * PAGE * row / (1e3 * us_per_step)
    roof = link_rate(runner.device) / 1e9
    return {
        "kv_in_main_gib": round(runner.num_pages * PAGE * row / 2**30, 3),
        "kv_link_gbps": round(gbps, 2),
        "link_roof_gbps": round(roof, 2),
        "kv_link_share": round(gbps / roof, 4),
    }
