"""The setting: a directory of blocks behind an engine's pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..kv_cache import BlockManager
from ..runner.paged_runner import PagedRunner
from .directory import ModelFolder
from .identity import fingerprint
from .tiers import KvTiers


@dataclass(frozen=True)
class KvDisk:
    """Blocks of the KV cache on disk.

    Attributes:
        path: the directory, which ``prepared`` has seen; ``limit``: bytes of all blocks in it.
        name: of the model, for people.
        weights: what tells the values of the model's weights from any others.
    """

    path: Path
    limit: int
    name: str
    weights: bytes

    def behind(self, runner: PagedRunner, manager: BlockManager) -> KvTiers:
        """The level behind a bound runner's pages."""
        model, pages = runner.model, runner.page_store()
        about = {
            "model": self.name,
            "architecture": model.name,
            "layout": pages.layout,
            "page_bytes": pages.page_bytes,
            "state_bytes": pages.state_bytes,
        }
        named = fingerprint(model, runner.plan, pages.layout, self.weights)
        folder = ModelFolder(self.path, self.limit, named, about)
        return KvTiers(manager, pages, folder, lambda: runner.weights.changed)
