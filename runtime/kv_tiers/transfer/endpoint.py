"""Mooncake's Transfer Engine in this process: memory that other nodes read, and theirs.

Two engines find each other by their addresses alone (``P2PHANDSHAKE``): there is no server of
metadata. Where the machine has an RDMA device memory crosses by it, otherwise by TCP. Nobody reads
or writes what is not registered.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

INSTALL = "Install pykernels[mooncake], and Debian's libibverbs1"
_SECONDS = 5
"""For one transfer, the least that Mooncake knows; a gigabyte has one second more."""
_SESSION = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_MOST_SLOTS = 1 << 24


@dataclass(frozen=True)
class Peer:
    """Where a node lends its blocks, see ``lent``.

    Attributes:
        session: HOST:PORT of its engine.
        model: fingerprint of the model, hexadecimal.
        table: address of its memory; ``pages``, ``states``: slots in it.

    Raises:
        ValueError: it is none.
    """

    session: str
    model: str
    table: int
    pages: int
    states: int

    def __post_init__(self) -> None:
        if not all(isinstance(each, str) for each in (self.session, self.model)):
            raise ValueError("a node's memory has another name")
        if not all(type(each) is int for each in (self.table, self.pages, self.states)):
            raise ValueError(f"{self.session} is no node's memory")
        numbers = 0 < self.table < 1 << 63 and 0 <= self.states <= _MOST_SLOTS
        if not (_SESSION.fullmatch(self.session) and numbers and 0 < self.pages <= _MOST_SLOTS):
            raise ValueError(f"{self.session} is no node's memory")

    @property
    def is_local(self) -> bool:
        """Whether only its own machine reaches it."""
        return self.session.startswith(("127.", "localhost:", "[::1]:"))


class Slow(Exception):
    """A transfer's time was up: what it was to fill may be written to later."""


class Endpoint:
    """An engine at an address of this machine.

    Args:
        host: as other nodes find it.

    Attributes:
        session: HOST:PORT of it; ``protocol``: "rdma" or "tcp".

    Raises:
        PykernelsError: Mooncake is not installed, or there is no such address.
    """

    def __init__(self, host: str) -> None:
        check_transfer(host)
        self.protocol = protocol()
        self._engine = _module().TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", self.protocol, "")
        port = 0 if code else self._engine.get_rpc_port()
        if not port:
            raise PykernelsError(
                f"Mooncake's Transfer Engine cannot listen at {host}: error {code}",
                "Free a port from MC_MIN_RPC_PORT to MC_MAX_RPC_PORT (15000 to 17000)",
            )
        self.session = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def register(self, address: int, nbytes: int) -> None:
        """Lets others read and write this memory, and fills it from theirs. Raises OSError."""
        if code := self._engine.register_memory(address, nbytes):
            raise OSError(f"error {code}: {nbytes} bytes cannot be registered")

    def forget(self, address: int) -> None:
        """It is this process's alone again."""
        self._engine.unregister_memory(address)

    def read(
        self, session: str, here: Sequence[int], there: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Copies pieces of another engine's memory, whose addresses are given.

        Raises:
            OSError: the other one is gone, or that is no memory of its; ``Slow``.
        """
        began = time.monotonic()
        code = self._engine.batch_transfer_sync_read(session, here, there, sizes)
        if code and time.monotonic() - began >= _SECONDS:
            raise Slow
        if code:
            raise OSError(f"error {code}")


def protocol() -> str:
    """By which memory crosses from this machine."""
    devices = Path("/sys/class/infiniband")
    there = devices.is_dir() and any(devices.iterdir())
    return "rdma" if there and "MC_FORCE_TCP" not in os.environ else "tcp"


def why_not() -> str | None:
    """Why there is no Transfer Engine here; None: there is."""
    try:
        _module()
    except PykernelsError as error:
        return error.cause
    return None


def check_transfer(host: str) -> None:
    """Raises PykernelsError unless Mooncake is installed, and an engine can listen at ``host``."""
    hint = "Give an address of this machine at which the other nodes find it"
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PykernelsError(f"{host} is no address of this machine: {why}", hint) from error
    if address[0] in ("0.0.0.0", "::"):
        raise PykernelsError(f"{host} is every address of this machine, and none of it", hint)
    _module()


def _module() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it tells of each of its steps
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(_SECONDS))
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise PykernelsError(f"Mooncake cannot be imported: {error}", INSTALL) from error
