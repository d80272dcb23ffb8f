"""Blocks in Mooncake Store: the memory of several machines, behind one master.

A value is what a block's file is: a header, and the payload with its checksum (``block``), so what
somebody else has put under a name is used only if it is that block. Memory crosses by Mooncake's
Transfer Engine from and to a buffer that is registered with it.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from pykernels.errors import PykernelsError

from ..kv_cache.page_store import Bytes, PageStore
from .block import BlockName
from .folder import Found

SCHEME = "mooncake"
_BUFFER = 64 << 20
"""Bytes that Mooncake has for requests of this process."""
_BATCH = 32 << 20
"""Bytes of the blocks that are got at once."""
_INSTALL = "Install pykernels[mooncake], and Debian's libibverbs1"
_GONE = -704
"""Mooncake's OBJECT_NOT_FOUND."""


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a master's address.

    Raises:
        PykernelsError: it is none.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == SCHEME and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    except ValueError:
        pass  # a port out of range
    raise PykernelsError(f"{url} is no address of a store", "Give mooncake://HOST:PORT")


class MooncakeError(OSError):
    """The store has failed, or is not there."""


class MooncakeBlocks:
    """A member of a store; its methods are called by one thread.

    Args:
        url: of the master.
        lent: bytes of main memory that this process gives to the store.
        fingerprint: of the model.
        pages: of the device, by which a value's size is known.

    Attributes:
        names: of files of blocks that were there when somebody asked, or were put there.

    Raises:
        PykernelsError: Mooncake is not installed, or there is no such master.
    """

    def __init__(self, url: str, lent: int, fingerprint: bytes, pages: PageStore) -> None:
        self.root, self._model, self._pages = url, fingerprint.hex(), pages
        self.names: set[str] = set()
        host, port = address_of(url)
        self._store = _connected(host, port, lent)
        self._where = _module().ReplicateConfig()
        if lent:  # a node whose memory it is writes without a network
            self._where.preferred_segment = self._store.get_hostname()
        self._buffer = np.empty(0, np.uint8)
        self._ahead: dict[str, tuple[int, int]] = {}  # where it is in the buffer, and what was got

    level = "store"

    def offers(self, name: str) -> bool:
        """Whether other members find the block of this file's name."""
        return name in self.names

    def batch(self, blocks: Sequence[BlockName]) -> Sequence[BlockName]:
        """As many of these, from the first on, as are got at once."""
        ends = accumulate(map(self._size, blocks))
        fit = sum(end <= _BATCH for end in ends)
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
        sizes = [self._size(block) for block in blocks]
        self._ahead = {}
        buffer = self._room(sum(sizes))
        starts = list(accumulate(sizes, initial=0))[:-1]
        keys = [self._key(block.file) for block in blocks]
        places = [buffer.ctypes.data + at for at in starts]
        got = self._store.batch_get_into(keys, places, sizes)
        if len(got) != len(keys):
            raise MooncakeError("its answer has another length")
        for block, at, size in zip(blocks, starts, got, strict=True):
            self._ahead[block.file] = at, size

    def has_ahead(self, block: BlockName) -> bool:
        """Whether ``prefetch`` has got it."""
        return block.file in self._ahead

    def read(self, block: BlockName) -> tuple[Found, Bytes]:
        """Whether a block is there and whole, and its payload, valid until the next call.

        Raises:
            MooncakeError: of the store.
        """
        if block.file not in self._ahead:
            self.prefetch([block])
        at, got = self._ahead.pop(block.file)
        buffer = self._buffer[at : at + self._size(block)]
        payload = buffer[block.header_bytes :]
        if got == _GONE:
            self.names.discard(block.file)
            return "gone", payload
        if got < 0:
            raise MooncakeError(f"error {got}")
        whole = got == buffer.nbytes
        if whole and block.fits(buffer[: block.header_bytes].data, [payload.data]):
            return "whole", payload
        self.names.discard(block.file)
        self._store.remove(self._key(block.file))
        return "damaged", payload

    def write(self, block: BlockName, data: Bytes) -> int:
        """Puts a block there; returns the bytes of the value.

        Raises:
            MooncakeError: of the store, such as that it is full.
        """
        buffer = self._room(self._size(block))
        header = block.header([data.data])
        buffer[: len(header)] = np.frombuffer(header, np.uint8)
        buffer[len(header) :] = data
        key, place = self._key(block.file), buffer.ctypes.data
        code = self._store.put_from(key, place, buffer.nbytes, self._where)
        if code:
            raise MooncakeError(f"error {code}")
        self.names.add(block.file)
        return int(buffer.nbytes)

    def close(self) -> None:
        """Leaves the store; what it has lent is gone."""
        self._store.close()

    def _key(self, name: str) -> str:
        return f"pykernels/{self._model}/{name}"

    def _size(self, block: BlockName) -> int:
        """Bytes of a block's value."""
        return block.header_bytes + self._pages.nbytes(block.kind)

    def _room(self, nbytes: int) -> Bytes:
        """Registered memory; what was in it is not valid any more."""
        self._ahead = {}
        if len(self._buffer) < nbytes:
            if len(self._buffer):
                self._store.unregister_buffer(self._buffer.ctypes.data)
            self._buffer = np.empty(max(nbytes, _BATCH), np.uint8)
            place = self._buffer.ctypes.data
            if code := self._store.register_buffer(place, len(self._buffer)):
                self._buffer = np.empty(0, np.uint8)
                raise MooncakeError(f"error {code}: its buffer cannot be registered")
        return self._buffer[:nbytes]


def check_store(url: str) -> None:
    """Raises PykernelsError unless Mooncake is installed, and there is a master at the address."""
    _module()
    _own_address(*address_of(url))


def _module() -> Any:
    for name in ("MC_LOG_LEVEL", "MC_YLT_LOG_LEVEL"):  # else it tells of each of its steps
        os.environ.setdefault(name, "ERROR")
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise PykernelsError(f"Mooncake cannot be imported: {error}", _INSTALL) from error


def _own_address(host: str, port: int) -> str:
    """At which other members of the store find this machine."""
    try:
        with socket.create_connection((host, port), 5) as asked:
            return str(asked.getsockname()[0])
    except OSError as error:
        raise PykernelsError(
            f"there is no Mooncake master at {host}:{port}: {error.strerror or error}",
            f"Start it with `mooncake_master --rpc_port={port}`",
        ) from error


def _connected(host: str, port: int, lent: int) -> Any:
    """A client of the store. Raises PykernelsError."""
    store = _module().MooncakeDistributedStore()
    memory = _own_address(host, port), "P2PHANDSHAKE", lent, _BUFFER
    code = store.setup(*memory, "tcp", "", f"{host}:{port}")
    if code:
        raise PykernelsError(
            f"Mooncake's master at {host}:{port} does not take this server: error {code}",
            "Look at what mooncake_master says",
        )
    return store
