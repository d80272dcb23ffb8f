"""A master of Mooncake Store on this machine, where it is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def master() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    program = shutil.which("mooncake_master")
    if program is None:
        pytest.skip("there is no mooncake_master")
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
            ports.append(each.getsockname()[1])
    where = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    how = [f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    output = subprocess.DEVNULL
    with subprocess.Popen([program, *where, *how], stdout=output, stderr=output) as process:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", ports[0]), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        try:
            yield f"mooncake://127.0.0.1:{ports[0]}", process
        finally:
            process.kill()
