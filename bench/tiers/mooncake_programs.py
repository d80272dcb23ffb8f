"""Mooncake's programs on this machine: a master, a process that lends memory, and the benchmark of
its Transfer Engine, all over TCP on loopback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pykernels.errors import PykernelsError

_HINT = "Install pykernels[mooncake], and Debian's libibverbs1"
_WAIT_SECONDS = 30.0
LEASE_SECONDS = 1.0
_LENDER = """
import sys
from runtime.kv_tiers.blocks.master import address_of, connected
store = connected(*address_of(sys.argv[1]), int(sys.argv[2]))
print("lends", flush=True)
sys.stdin.read()
"""


@contextmanager
def store(lent: int) -> Iterator[str]:
    """The address of a store that has so many bytes, of another process; what was got may be
    removed after ``LEASE_SECONDS``."""
    with _ports(2) as (rpc, metrics):
        ports = [f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
    hosts = [
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        f"--default_kv_lease_ttl={int(1e3 * LEASE_SECONDS)}",
    ]
    url = f"mooncake://127.0.0.1:{rpc}"
    with _running([_program("mooncake_master"), *hosts, *ports]):
        _await_port(rpc)
        with _running([sys.executable, "-c", _LENDER, url, str(lent)]) as lender:
            assert lender.stdout is not None
            if not any("lends" in line for line in lender.stdout):
                raise PykernelsError(f"no memory could be lent to the store: {lent} bytes", _HINT)
            yield url


@contextmanager
def engine_target() -> Iterator[str]:
    """The address of `transfer_engine_bench` as a target."""
    arguments = ["--mode=target", *_engine()]
    with _running([_program("transfer_engine_bench"), *arguments]) as target:
        assert target.stdout is not None
        for line in target.stdout:
            if found := re.search(r"listening on (127\.0\.0\.1:\d+)", line):
                break
        else:
            raise PykernelsError("transfer_engine_bench does not listen", _HINT)
        time.sleep(2)  # until its memory is registered
        yield found[1]


def engine_rate(target: str, operation: str, batch: int, nbytes: int, seconds: int) -> float:
    """Bytes a second that `transfer_engine_bench` says, of one thread.

    Args:
        operation: "read" or "write"; ``batch``: blocks of ``nbytes`` at once.
    """
    command = [_program("transfer_engine_bench"), "--mode=initiator", *_engine()]
    command += [f"--segment_id={target}", f"--operation={operation}", f"--batch_size={batch}"]
    command += [f"--block_size={nbytes}", "--threads=1", f"--duration={seconds}"]
    command += [f"--buffer_size={max(1 << 30, 2 * batch * nbytes)}", "--report_precision=4"]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    found = re.search(r"throughput ([\d.]+) GB/s", done.stdout + done.stderr)
    if found is None:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise PykernelsError(f"transfer_engine_bench measured nothing: {last}", _HINT)
    return float(found[1]) * 1e9


def _engine() -> list[str]:
    with _ports(1) as (port,):
        here = f"--local_server_name=127.0.0.1:{port}"
    return ["--protocol=tcp", "--metadata_server=P2PHANDSHAKE", "--auto_discovery", here]


def _environment() -> dict[str, str]:
    return os.environ | {"MC_LOG_LEVEL": "INFO"}


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PykernelsError(f"there is no {name}", _HINT)
    return found


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Mooncake's programs are scripts that start what they are named after: both end with it."""
    with subprocess.Popen(
        command,
        text=True,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it has failed
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _ports(count: int) -> Iterator[list[int]]:
    """Free ones."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _await_port(port: int) -> None:
    give_up = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as error:
            if time.monotonic() > give_up:
                raise PykernelsError(f"mooncake_master does not answer: {error}", _HINT) from error
            time.sleep(0.1)
