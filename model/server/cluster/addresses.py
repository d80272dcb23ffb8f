"""The nodes that a router is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pykernels.errors import PykernelsError

from ..http.settings import DECODE, PREFILL


@dataclass(frozen=True)
class Address:
    """Where a node is.

    Attributes:
        name: for people; ``url``: without a path.
    """

    role: str
    name: str
    url: str


def addresses(prefill: Sequence[str], decode: Sequence[str]) -> list[Address]:
    """What the options say: URLs, or NAME=URL.

    Raises:
        PykernelsError: no node of a role, no address, one name or one address twice.
    """
    found = []
    for role, given in ((PREFILL, prefill), (DECODE, decode)):
        if not given:
            raise PykernelsError(
                f"--role router without a {role} node", f"Give --{role}-node http://HOST:PORT"
            )
        found += [_address(role, each) for each in given]
    for what in ("name", "url"):
        (value, count), *_ = Counter(getattr(each, what) for each in found).most_common(1)
        if count > 1:
            raise PykernelsError(
                f"{count} nodes have the {'name' if what == 'name' else 'address'} {value}",
                "Give each its own, as NAME=http://HOST:PORT",
            )
    return found


def _address(role: str, given: str) -> Address:
    before, _, rest = given.partition("://")
    name, equals, scheme = before.rpartition("=")
    url = f"{scheme}://{rest}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
        good = good and parts.path in ("", "/", "/v1") and not (parts.query or parts.username)
    except ValueError:  # a port out of range
        good = False
    if not good or (equals and not name):
        raise PykernelsError(
            f"--{role}-node {given} is no address of a node", "Give http://HOST:PORT, or NAME=URL"
        )
    return Address(role, name or parts.netloc, f"{parts.scheme}://{parts.netloc}")
