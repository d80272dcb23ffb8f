"""Blocks in the memory of other nodes, which are copied from there by Mooncake's Transfer Engine:
no store, no master, no server of metadata.

A router says which nodes there are (``meet``). A block that is not what its name says, or whose
node has gone, is computed anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from pykernels.errors import PykernelsError

from ...kv_cache.page_store import Bytes, Kind, PageStore
from ..blocks.block import BlockName
from ..blocks.folder import Found
from .endpoint import Endpoint, Peer, Slow
from .lent import Layout, LentBlocks

LOG = logging.getLogger("pykernels")
_BATCH = 32 << 20
"""Bytes of the blocks that are copied at once."""
_MOST_PEERS = 64
_MOST_KNOWN = 1 << 16
"""Blocks of other nodes whose place is remembered."""
_LOST_SECONDS = 10.0
"""For which a node that did not answer is left alone."""
_SLOW_SECONDS = 60.0
"""The same, after a time that was up: each costs the thread that moves blocks so much."""


class TransferBlocks:
    """See ``SharedBlocks``: what this process lends, and what others do.

    All methods but ``meet`` and ``offers`` are called by one thread.

    Args:
        host: address of this machine, as other nodes find it.
        limit: bytes of main memory that this process lends.
        fingerprint: of the model; ``pages``: of the device; ``page_size``: tokens of a page.

    Attributes:
        peer: where others find what it lends.

    Raises:
        PykernelsError: Mooncake is not installed, cannot listen there, or there is too little
            memory.
    """

    level, rows = "peers", None

    def __init__(
        self, host: str, limit: int, fingerprint: bytes, pages: PageStore, page_size: int
    ) -> None:
        self._end, self._pages = Endpoint(host), pages
        self.protocol, self.root = self._end.protocol, "other nodes' memory"
        self.lent = LentBlocks(pages, page_size, limit)
        place, layout = self.lent.memory.ctypes.data, self.lent.layout
        try:
            self._end.register(place, len(self.lent.memory))
        except OSError as error:
            raise PykernelsError(
                f"Mooncake's Transfer Engine does not take {limit / 2**30:.2g} GiB: {error}",
                "Give a smaller kv_transfer_gib, or raise `ulimit -l`",
            ) from error
        self.peer = Peer(self._end.session, fingerprint.hex(), place, *layout.slots)
        self.names: set[str] = set()
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # who was met last is last
        self._lost: dict[str, float] = {}  # and until when
        self._told: set[str] = set()
        self._known: OrderedDict[str, tuple[Peer, Kind, int]] = OrderedDict()
        self._buffer = np.empty(0, np.uint8)
        self._kept: list[Bytes] = []  # written to by whom we do not wait for any more
        self._ahead: dict[str, Bytes] = {}

    # What any thread asks.

    def meet(self, peers: Iterable[Peer]) -> None:
        """There are these nodes, the best to ask first."""
        with self._lock:
            for peer in reversed(list(peers)):
                if peer.model == self.peer.model and peer.session != self.peer.session:
                    self._peers[peer.session] = peer
                    self._peers.move_to_end(peer.session)
            while len(self._peers) > _MOST_PEERS:
                self._peers.popitem(last=False)

    def offers(self, name: str) -> bool:
        return name in self.lent

    # What the worker's thread does.

    def batch(self, blocks: Sequence[BlockName]) -> Sequence[BlockName]:
        ends = accumulate(self.lent.layout.sizes[block.kind] for block in blocks)
        return blocks[: max(1, sum(end <= _BATCH for end in ends))]

    def ask(self, names: Iterable[str]) -> None:
        wanted = {name for name in names if name not in self.lent}
        for name in wanted:
            self._forget(name)
        with self._lock:
            peers = list(reversed(self._peers.values()))
        for peer in peers:
            if not wanted:
                return
            if time.monotonic() < self._lost.get(peer.session, 0.0):
                continue
            layout = self._layout(peer)
            table = self._room(layout.table_bytes)
            if self._copied(peer, [table], [0]):
                found = layout.found(table)
                for name in wanted & found.keys():
                    self._known[name] = (peer, *found[name])
                    self.names.add(name)
                wanted -= found.keys()
        while len(self._known) > _MOST_KNOWN:
            self._forget(next(iter(self._known)))

    def prefetch(self, blocks: Sequence[BlockName]) -> None:
        sizes = [self.lent.layout.sizes[block.kind] for block in blocks]
        buffer = self._room(sum(sizes))
        ends = list(accumulate(sizes))
        parts = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        of_peers: dict[Peer, list[tuple[BlockName, Bytes, int]]] = {}
        for block, part in zip(blocks, parts, strict=True):
            if (known := self._known.get(block.file)) is not None:
                peer, kind, slot = known
                there = self._layout(peer).offset(kind, slot)
                of_peers.setdefault(peer, []).append((block, part, there))
        for peer, wanted in of_peers.items():
            named, here, places = zip(*wanted, strict=True)
            if self._copied(peer, here, places):
                self._ahead |= {block.file: p for block, p in zip(named, here, strict=True)}

    def has_ahead(self, block: BlockName) -> bool:
        return block.file in self._ahead

    def read(self, block: BlockName) -> tuple[Found, Bytes]:
        slot = self.lent.find(block)
        if slot is None:
            if block.file not in self._ahead:
                self.prefetch([block])
            slot = self._ahead.pop(block.file, None)
        if slot is None:
            self._forget(block.file)
            return "gone", self._buffer[:0]
        header = slot[: block.header_bytes]
        payload = slot[block.header_bytes :][: self._pages.nbytes(block.kind)]
        if block.fits(header.data, [payload.data]):
            return "whole", payload
        self._forget(block.file)
        self.lent.drop(block)
        return "damaged" if block.is_in(header.data) else "gone", payload

    def write_all(self, blocks: Sequence[BlockName], data: Sequence[Bytes]) -> list[int]:
        return [self._write(block, own) for block, own in zip(blocks, data, strict=True)]

    def _write(self, block: BlockName, data: Bytes) -> int:
        gone = self.lent.put(block, data)
        if gone is None:
            return 0
        self.names.discard(gone)
        self.names.add(block.file)
        return block.header_bytes + len(data)

    def close(self) -> None:
        for memory in (self.lent.memory, self._buffer, *self._kept):
            if len(memory):
                self._end.forget(memory.ctypes.data)

    def _copied(self, peer: Peer, here: Sequence[Bytes], offsets: Sequence[int]) -> bool:
        """Whether these parts of a node's memory are here now; one that fails is left alone."""
        places, sizes = [part.ctypes.data for part in here], [len(part) for part in here]
        try:
            there = [peer.table + offset for offset in offsets]
            self._end.read(peer.session, places, there, sizes)
            return True
        except Slow:
            self._kept.append(self._buffer)
            self._buffer, self._ahead = np.empty(0, np.uint8), {}
            self._lose(peer, "it has not answered in time", _SLOW_SECONDS)
        except OSError as error:
            self._lose(peer, str(error), _LOST_SECONDS)
        return False

    def _lose(self, peer: Peer, why: str, seconds: float) -> None:
        session = peer.session
        self._lost[session] = time.monotonic() + seconds
        with self._lock:
            self._peers.pop(session, None)
        for name in [name for name, (other, *_) in self._known.items() if other == peer]:
            self._forget(name)
        if session not in self._told:
            self._told.add(session)
            LOG.warning("pages of the node at %s cannot be read: %s", session, why)

    def _forget(self, name: str) -> None:
        """Nobody is known to have it but this process."""
        self._known.pop(name, None)
        if name not in self.lent:
            self.names.discard(name)

    def _layout(self, peer: Peer) -> Layout:
        return Layout((peer.pages, peer.states), self.lent.layout.sizes)

    def _room(self, nbytes: int) -> Bytes:
        """Registered memory; what was in it is not valid any more. Raises OSError."""
        self._ahead = {}
        if len(self._buffer) < nbytes:
            if len(self._buffer):
                self._end.forget(self._buffer.ctypes.data)
            self._buffer = np.empty(max(nbytes, _BATCH), np.uint8)
            try:
                self._end.register(self._buffer.ctypes.data, len(self._buffer))
            except OSError:
                self._buffer = np.empty(0, np.uint8)
                raise
        return self._buffer[:nbytes]
