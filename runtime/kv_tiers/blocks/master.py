"""Mooncake's master: its address, and how a process becomes a member of its store."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from pykernels.errors import PykernelsError

SCHEME = "mooncake"
_BUFFER = 64 << 20
"""Bytes that Mooncake has for requests of this process."""
_INSTALL = "Install pykernels[mooncake], and Debian's libibverbs1"


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


def check_store(url: str) -> None:
    """Raises PykernelsError unless Mooncake is installed, and there is a master at the address."""
    module()
    _own_address(*address_of(url))


def module() -> Any:
    """``mooncake.store``. Raises PykernelsError: it cannot be imported."""
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


def connected(host: str, port: int, lent: int) -> Any:
    """A client of the store. Raises PykernelsError."""
    store = module().MooncakeDistributedStore()
    memory = _own_address(host, port), "P2PHANDSHAKE", lent, _BUFFER
    code = store.setup(*memory, "tcp", "", f"{host}:{port}")
    if code:
        raise PykernelsError(
            f"Mooncake's master at {host}:{port} does not take this server: error {code}",
            "Look at what mooncake_master says",
        )
    return store
