"""Blocks in Mooncake Store: the memory of several machines, behind one master.

A value is what a block's file is: a header, and the payload with its checksum (``block``), so what
somebody else has put under a name is used only if it is that block. Memory crosses by Mooncake's
Transfer Engine from and to a buffer that is registered with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pykernels.errors import PykernelsError

from ...kv_cache.page_store import Bytes, Kind, PageStore
from .block import HEADER, BlockName
from .folder import Found
from .master import address_of, connected, module
from .ram import RamBlocks

_BATCH = 64
"""Blocks that cross at once; ``_BATCH_BYTES``: of all of them. A load waits for what is written."""
_BATCH_BYTES = 64 << 20
_GONE = -704
"""Mooncake's OBJECT_NOT_FOUND."""


class MooncakeError(OSError):
    """The store has failed, or is not there."""


class MooncakeBlocks:
    """A member of a store; its methods are called by one thread.

    Args:
        url: of the master.
        lent: bytes of main memory that this process gives to the store.
        fingerprint: of the model.
        pages: of the device, by which a value's size is known.
        ram: blocks in main memory, with room for headers: a value goes from there to the store and
            back without a copy. None: what is written lies in ``rows`` for that time, and what is
            read in another buffer.

    Attributes:
        names: of files of blocks that were there when somebody asked, or were put there.
        rows: memory from which blocks are put without a copy.

    Raises:
        PykernelsError: Mooncake is not installed, or there is no such master.
    """

    def __init__(
        self,
        url: str,
        lent: int,
        fingerprint: bytes,
        pages: PageStore,
        ram: RamBlocks | None = None,
    ) -> None:
        self.root, self._model, self._pages = url, fingerprint.hex(), pages
        self.names: set[str] = set()
        host, port = address_of(url)
        self._store = connected(host, port, lent)
        self._where = module().ReplicateConfig()
        if lent:  # a node whose memory it is writes without a network
            self._where.preferred_segment = self._store.get_hostname()
        least = 2 * (HEADER + max(map(pages.nbytes, Kind)))
        self._ram, self._buffer = ram, np.empty(0, np.uint8)
        self.rows = ram or RamBlocks(pages, max(_BATCH_BYTES, least), HEADER)
        try:
            for memory in self.rows.memory.values():
                if memory.size:
                    self._register(memory)
        except MooncakeError as error:
            self._store.close()
            raise PykernelsError(
                f"Mooncake's Transfer Engine does not take the memory of blocks: {error}",
                "Give a smaller kv_ram_gib, or raise `ulimit -l`",
            ) from error
        self._ahead: dict[str, _Got] = {}

    level = "store"

    def offers(self, name: str) -> bool:
        """Whether other members find the block of this file's name."""
        return name in self.names

    def batch(self, blocks: Sequence[BlockName]) -> Sequence[BlockName]:
        """As many of these, from the first on, as cross at once."""
        ends = accumulate(map(self._size, blocks))
        fit = min(_BATCH, sum(end <= _BATCH_BYTES for end in ends))
        if self._ram is not None:  # half of it, since nothing that is there is to go for more
            fit = min([fit, *(self._ram.count(block.kind) // 2 for block in blocks)])
        return blocks[: max(1, fit)]

    def ask(self, names: Iterable[str]) -> None:
        """Finds which of these blocks are there.

        Raises:
            MooncakeError: it cannot be said.
        """
        asked = list(names)
        found = self._store.batch_is_exist([self._key(name) for name in asked])
        if len(found) != len(asked) or min(found, default=0) < 0:
            raise MooncakeError(f"error {min(found, default=0)}")
        for name, there in zip(asked, found, strict=True):
            (self.names.add if there else self.names.discard)(name)

    def prefetch(self, blocks: Sequence[BlockName]) -> None:
        """Gets blocks that ``read`` will be asked for next, in one batch.

        Raises:
            MooncakeError: of the store.
        """
        self._forget_ahead()
        sizes = [self._size(block) for block in blocks]
        got = self._taken(blocks, sizes)
        keys = [self._key(block.file) for block in blocks]
        places = [each.value.ctypes.data for each in got]
        self._ahead = {block.file: each for block, each in zip(blocks, got, strict=True)}
        found = self._store.batch_get_into(keys, places, sizes)
        if len(found) != len(keys):
            self._forget_ahead()
            raise MooncakeError("its answer has another length")
        for each, size in zip(got, found, strict=True):
            each.size = size

    def has_ahead(self, block: BlockName) -> bool:
        """Whether ``prefetch`` has got it."""
        return block.file in self._ahead

    def read(self, block: BlockName) -> tuple[Found, Bytes]:
        """Whether a block is there and whole, and its payload, valid until the next call; then it
        is in ``ram`` too.

        Raises:
            MooncakeError: of the store.
        """
        if block.file not in self._ahead:
            self.prefetch([block])
        got = self._ahead.pop(block.file)
        payload = got.value[block.header_bytes :]
        whole = got.is_whole(block)
        if self._ram is not None and got.place >= 0:
            self._ram.give(block.kind, got.place, block if whole else None)
        if whole:
            return "whole", payload
        if got.size == _GONE:
            self.names.discard(block.file)
            return "gone", payload
        if got.size < 0:
            raise MooncakeError(f"error {got.size}")
        self.names.discard(block.file)
        self._store.remove(self._key(block.file))
        return "damaged", payload

    def write_all(self, blocks: Sequence[BlockName], data: Sequence[Bytes]) -> list[int]:
        """Puts blocks there, at most a ``batch``, in one batch.

        Args:
            data: payloads; those of ``rows`` are not copied.

        Returns:
            Bytes of each value; 0: it was not put there.

        Raises:
            MooncakeError: of the store, such as that it is full, and nothing was put there.
        """
        sizes, keys = list(map(self._size, blocks)), [self._key(block.file) for block in blocks]
        values = [self._value(block, own) for block, own in zip(blocks, data, strict=True)]
        copied = [i for i, value in enumerate(values) if value is None]
        if copied:
            self._forget_ahead()
            parts = _parts(self._room(sum(sizes[i] for i in copied)), [sizes[i] for i in copied])
            for i, part in zip(copied, parts, strict=True):
                header = blocks[i].header([data[i].data])
                part[: len(header)] = np.frombuffer(header, np.uint8)
                part[len(header) :], values[i] = data[i], part
        places = [value.ctypes.data for value in values if value is not None]
        codes = self._store.batch_put_from(keys, places, sizes, self._where)
        if len(codes) != len(blocks) or all(codes):
            raise MooncakeError(f"error {codes[0] if codes else -1}")
        self.names.update(block.file for block, code in zip(blocks, codes, strict=True) if not code)
        return [0 if code else size for code, size in zip(codes, sizes, strict=True)]

    def close(self) -> None:
        """Leaves the store; what it has lent is gone."""
        self._store.close()

    def _key(self, name: str) -> str:
        return f"pykernels/{self._model}/{name}"

    def _size(self, block: BlockName) -> int:
        """Bytes of a block's value."""
        return block.header_bytes + self._pages.nbytes(block.kind)

    def _value(self, block: BlockName, data: Bytes) -> Bytes | None:
        """The memory of a block in ``rows``, header and payload; None: it is not there."""
        value = self.rows.value(block)
        if value is None or len(value) < self._size(block):
            return None
        value = value[-self._size(block) :]
        at = value.ctypes.data + block.header_bytes
        return value if data.ctypes.data == at else None

    def _taken(self, blocks: Sequence[BlockName], sizes: Sequence[int]) -> list[_Got]:
        """Registered memory for values."""
        ram = self._ram
        if ram is None or any(ram.count(block.kind) < 2 for block in blocks):
            return [_Got(part) for part in _parts(self._room(sum(sizes)), sizes)]
        places = [ram.take(block.kind) for block in blocks]
        return [
            _Got(ram.memory[block.kind][place][-size:], block.kind, place)
            for block, place, size in zip(blocks, places, sizes, strict=True)
        ]

    def _forget_ahead(self) -> None:
        if self._ram is not None:
            for got in self._ahead.values():
                if got.place >= 0:
                    self._ram.give(got.kind, got.place)
        self._ahead = {}

    def _room(self, nbytes: int) -> Bytes:
        """Registered memory; what was in it is not valid any more."""
        if len(self._buffer) < nbytes:
            if len(self._buffer):
                self._store.unregister_buffer(self._buffer.ctypes.data)
            self._buffer = np.empty(0, np.uint8)
            buffer = np.empty(max(nbytes, _BATCH_BYTES), np.uint8)
            self._register(buffer)
            self._buffer = buffer
        return self._buffer[:nbytes]

    def _register(self, memory: Bytes) -> None:
        if code := self._store.register_buffer(memory.ctypes.data, memory.nbytes):
            raise MooncakeError(
                f"error {code}: {memory.nbytes / 2**30:.2f} GiB of memory cannot be registered"
            )


@dataclass(eq=False, slots=True)
class _Got:
    """A value that was got: where, its place in main memory's blocks, its size or an error."""

    value: Bytes
    kind: Kind = Kind.PAGE
    place: int = -1
    size: int = _GONE

    def is_whole(self, block: BlockName) -> bool:
        """Whether it is this block."""
        header, payload = self.value[: block.header_bytes], self.value[block.header_bytes :]
        return self.size == len(self.value) and block.fits(header.data, [payload.data])


def _parts(buffer: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """One behind the other."""
    ends = list(accumulate(sizes))
    return [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
