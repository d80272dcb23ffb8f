"""The settings: what is behind an engine's pages; and what a model's blocks are named by: all that
decides what its keys and values are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pykernels.errors import PykernelsError

from ..kv_cache import BlockManager
from ..kv_cache.layout import PAGE
from ..kv_cache.page_store import Kind
from ..planning.execution import ExecutionPlan
from ..planning.lowerable import Lowerable
from ..runner.paged_runner import PagedRunner
from .blocks.block import HEADER, VERSION
from .blocks.folder import ModelFolder
from .blocks.mooncake import MooncakeBlocks
from .blocks.ram import RamBlocks
from .blocks.reading import fastest
from .blocks.shared import SharedBlocks
from .levels import Levels
from .tiers import KvTiers
from .transfer.blocks import TransferBlocks
from .transfer.handover import handover

LOG = logging.getLogger("pykernels")
FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class KvBehind:
    """Where blocks of the KV cache are besides pages.

    Attributes:
        ram: bytes of main memory beside a GPU; 0: none are there.
        disk: a directory, which ``prepared`` has seen; None: there is none.
        limit: bytes of all blocks in it.
        store: the address of a store of several machines, "mooncake://HOST:PORT"; "": none.
        lent: bytes of main memory that this process gives to it, or other nodes read.
        host: address of this machine at which other nodes read its memory; "": they do not.
        shared: other engines wait for what this one fills.
        name: of the model, for people.
        weights: what tells the values of the model's weights from any others.
    """

    ram: int
    disk: Path | None
    limit: int
    name: str
    weights: bytes
    store: str = ""
    lent: int = 0
    shared: bool = False
    host: str = ""

    def tiers(self, runner: PagedRunner, manager: BlockManager) -> KvTiers:
        """The levels behind a bound runner's pages.

        Raises:
            PykernelsError: too little memory or disk for a page.
        """
        model, pages = runner.model, runner.page_store()
        named = fingerprint(model, runner.plan, pages.layout, self.weights)
        about = {
            "model": self.name,
            "architecture": model.name,
            "layout": pages.layout,
            "page_bytes": pages.nbytes(Kind.PAGE),
            "state_bytes": pages.nbytes(Kind.STATE),
        }
        folder = None
        if self.disk is not None:
            if self.limit < 2 * (least := sum(map(pages.nbytes, Kind))):
                raise PykernelsError(
                    f"{self.limit / 2**20:.2g} MiB of disk hold no page, which takes"
                    f" {least / 2**20:.1f} MiB",
                    f"Free some space in {self.disk}, or give more GiB of it",
                )
            way = fastest(self.disk, pages.nbytes(Kind.PAGE))
            LOG.info("blocks of the KV cache in %s are read %s", self.disk, way.name)
            folder = ModelFolder(self.disk, self.limit, named, about, way)
        ram = RamBlocks(pages, self.ram, HEADER if self.store else 0) if self.ram else None
        store: SharedBlocks | None = None
        transfer = None
        if self.store:
            store = MooncakeBlocks(self.store, self.lent, named, pages, ram)
        elif self.host:
            size = manager.page_size
            store = transfer = TransferBlocks(self.host, self.lent, named, pages, size)
        levels = Levels(pages, folder, ram, store, self.shared)
        shares = None
        if self.shared:
            disk = "" if self.disk is None else str(self.disk)
            shares = handover(transfer, self.store, disk, manager.page_size)
        return KvTiers(manager, levels, named, lambda: runner.weights.changed, self.shared, shares)


def fingerprint(model: Lowerable, plan: ExecutionPlan, layout: str, weights: bytes) -> bytes:
    """16 bytes that are others for another model, format of weights or layout of pages.

    They do not depend on the device and its kernels, which compute the same within their
    precision, nor on how a step is cut.

    Args:
        plan: of a runner that is bound: what it has measured is decided.
        layout: of its pages (``PageStore``).
        weights: what tells the values of the model's weights from any others.
    """
    program = model.lower()
    parts: Sequence[object] = (
        VERSION,
        PAGE,
        layout,
        plan.deferred,
        program,
        sorted(map(repr, program.weights.values())),
        weights,
    )
    found = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()
