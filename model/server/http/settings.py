"""What a user of the server chooses; each setting is an option of `pykernels serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykernels.errors import PykernelsError
from runtime.planning.option import SettingError, check_one_of, option

PREFILL, DECODE, ROUTER = ROLES = "prefill", "decode", "router"


def _megabytes(given: int) -> int:
    return given << 20


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server; each is checked when the object is made.

    Attributes:
        host: address to listen at; only this machine reaches the default.
        port: 0: any free one.
        api_key: what each request must bring; None: nobody is asked.
        role: of this server among several, see ``server.cluster``; None: it does all by itself.
        names: of the model; a request may give any of them, or none.
        max_waiting: requests that may wait behind those that run; more get 429.
        max_seconds: of a request, after which it ends with what it has; None: no limit.
        max_ttft: seconds; a request whose first token is estimated to come later gets 429; None: no
            limit.
        max_outputs: outputs that one request may ask for: its prompts times ``n``.
        max_body_bytes: of a request.
        body_seconds: that a client may let pass between two pieces of its request.
        send_seconds: that a client may take to accept a piece of an answer.
        silence_seconds: after which a stream sends a comment, so that no proxy closes it.
        drain_seconds: that running requests get to end after SIGTERM.
        max_requests: answered at once; more get 503, all but those for the server's health.
        head_seconds: that a client may take for a request's line and headers.
        max_head_bytes: of a request's line and headers.
        log_requests: one line for each request: method, path, status, seconds.
        cors_origins: web pages that a browser lets use the server.

    Raises:
        PykernelsError: a value out of its range, by name.
    """

    host: str = option("127.0.0.1", "0.0.0.0 lets other machines in.", "ADDRESS")
    port: int = option(8080, "0: any free one.", kind=int, least=0, most=65535)
    api_key: str | None = None
    role: str | None = option(
        None,
        "Of several servers as one: read prompts, write answers, or share them out to such nodes.",
        "|".join(ROLES),
        shown="all by itself",
    )
    names: tuple[str, ...] = ("model",)
    max_waiting: int = option(64, "Outputs that may wait; further ones get 429.", kind=int, least=0)
    max_ttft: float | None = option(
        None, "429 where the first token is expected later.", "S", kind=float
    )
    max_seconds: float | None = option(None, "After which an output ends.", "S", kind=float)
    max_outputs: int = 64
    max_body_bytes: int = option(
        16 << 20, "Of a request.", "MB", kind=int, text=16, least=1, most=4096, read=_megabytes
    )
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    silence_seconds: float = 15.0
    drain_seconds: float = option(
        30.0, "To end running requests at SIGTERM.", "S", kind=float, least=0
    )
    max_requests: int = 1000
    head_seconds: float = 15.0
    max_head_bytes: int = 64 << 10
    log_requests: bool = option(
        False, "Log method, path, status and seconds; never a text.", kind=bool
    )
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65535),
            ("max_waiting", 0, 1 << 31),
            ("max_outputs", 1, 1 << 12),
            ("max_body_bytes", 1 << 10, 1 << 32),
            ("max_requests", 1, 1 << 20),
            ("max_head_bytes", 1 << 10, 1 << 20),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise _bad(name, value, f"a whole number from {least} to {most}")
        for name in (
            *("head_seconds", "body_seconds", "send_seconds", "silence_seconds"),
            *("max_seconds", "max_ttft"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise _bad(name, value, "a positive number")
        if not 0 <= self.drain_seconds < math.inf:
            raise _bad("drain_seconds", self.drain_seconds, "a number from 0")
        if self.role is not None:
            check_one_of("role", self.role, ROLES)
        if not self.names or not all(self.names):
            raise _bad("names", self.names, "at least one name")
        if self.api_key is not None and not self.api_key.isascii():
            raise PykernelsError("the API key has letters that a header cannot hold", "Use ASCII")


def _bad(name: str, value: object, wanted: str) -> PykernelsError:
    return SettingError(name, value, f"Give {wanted}", "cannot be used")
