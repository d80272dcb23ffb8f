"""What layers with a window leave of a model's KV cache."""

from __future__ import annotations

from runtime.engine import EngineConfig
from runtime.engine.scheduling.config import STEP_TOKENS
from runtime.kv_cache.layout import PAGE
from runtime.planning.config import ExecutionConfig
from runtime.planning.windows import window_pages
from runtime.program.sizes import StepSizes

from ..architectures.decoder import Decoder
from ..checkpoint.cache_cost import CacheCost

GIB = 1 << 30


def cost_of(execution: ExecutionConfig, engine: EngineConfig, decoder: Decoder) -> CacheCost:
    """What the cache of a model takes."""
    if _is_kept_whole(engine):
        return CacheCost(decoder.token_bytes)
    tokens = engine.max_num_batched_tokens
    tokens = tokens if execution.on_gpu else tokens or STEP_TOKENS

    def pool(pages: int) -> int:
        return window_pages(decoder, pages, engine.max_num_seqs, tokens, execution.device)

    return CacheCost(decoder.token_bytes, decoder.window_token_bytes, pool)


def described(engine: EngineConfig, decoder: Decoder, sizes: StepSizes) -> list[str]:
    """What became of layers with a window, a line; none has one: no line."""
    if not decoder.window or decoder.states:
        return []
    kept = f"layers with a window of {decoder.window} tokens"
    if not sizes.window_pages:
        why = ": levels behind the cache take whole pages" if _is_kept_whole(engine) else ""
        return [f"{kept} keep as much as the others{why}"]
    saved = (sizes.pages - sizes.window_pages) * PAGE * decoder.window_token_bytes / GIB
    return [
        f"{kept} give back what is behind it: a cache of {sizes.pages * PAGE} tokens has"
        f" {sizes.window_pages * PAGE} of them, {saved:.2f} GiB less"
    ]


def _is_kept_whole(engine: EngineConfig) -> bool:
    """Whether levels behind the cache take pages of all layers."""
    behind = engine.kv_disk, engine.kv_store, engine.kv_ram_gib, engine.transfer_host
    return any(behind)
