"""llama.cpp's prompts beside ours: as its program takes them, and at its best."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.cli.shared.common import note

from ..e2e.model_options import ModelOptions
from ..peers.client import PeerMissing
from ..peers.llama_bench import prompts
from ..peers.llama_settings import ON_THE_GPU, batchings
from ..peers.llama_tools import ToolMissing, find

Row = dict[str, Any]
OFFLOAD = ON_THE_GPU[0]
"""All its experts in main memory, as ours."""
WAYS = tuple(f"{OFFLOAD.name} {kind}" for kind in ("default", "best"))
_REPEAT = 3


def llama_rows(chosen: ModelOptions, lengths: tuple[int, ...], threads: int) -> Iterator[Row]:
    """Its prompts, of each length a row by default and a row with the fastest of ``batchings``,
    ``settings`` in both; none, and a note why, where it is not there."""
    from ..e2e.ours import Shape
    from ..peers.gguf_files.types import TYPES
    from ..peers.gguf_files.write import FAMILIES, model_file

    arch, fmt = chosen.arch or "", chosen.format or "q4_k"
    config = Shape(arch, chosen.layers, None, chosen.vocab).config()
    if config.model_type not in FAMILIES or fmt not in TYPES:
        note(f"no llama.cpp: it has no {arch} in {fmt} here")
        return
    try:
        find("llama-bench", OFFLOAD.tools)
        with tempfile.TemporaryDirectory() as folder:
            file = model_file(config, fmt, Path(folder), arch)
            for n in lengths:
                tried = batchings(n, OFFLOAD)
                rates = prompts(file, n, threads, tried, OFFLOAD, _REPEAT)
                best = max(rates, key=rates.__getitem__)
                default = next(one for one in rates if one.is_default)
                for way, one in zip(WAYS, (default, best), strict=True):
                    words = [*OFFLOAD.options, "-t", str(threads), *one.options]
                    yield {
                        "way": way,
                        "tokens": n,
                        "tok_s": rates[one],
                        "settings": " ".join(words),
                    }
    except (PeerMissing, ToolMissing) as error:
        note(f"no llama.cpp: {error}")
