"""A router, its nodes and perhaps a Mooncake master as processes on this machine, to be killed."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from pykernels.errors import PykernelsError

NODES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
_START_SECONDS = 600.0
_POLL_SECONDS = 0.1


class Process:
    """One of them, which is started again at its port.

    Args:
        role: "prefill", "decode", "router", "master" or "server".
        log: where its standard error goes, of all its lives.
    """

    def __init__(self, name: str, role: str, command: Sequence[str], port: int, log: Path) -> None:
        self.name, self.role, self.port, self.log = name, role, port, log
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self.start()

    def start(self) -> None:
        """Starts it; ``wait`` says when it is there."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        try:
            if self.role == "master":
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            return httpx2.get(f"{self.url}/ready", timeout=5, trust_env=False).status_code == 200
        except (OSError, httpx2.HTTPError):
            return False

    def wait(self) -> float:
        """Seconds until it takes requests. Raises PykernelsError: it does not."""
        began = time.monotonic()
        while not self.ready:
            if not self.alive or time.monotonic() > began + _START_SECONDS:
                words = self.log.read_text(errors="replace").splitlines()[-3:]
                raise PykernelsError(f"{self.name} did not start", " ".join(words))
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def warnings(self, of: str) -> int:
        """Lines of its log that have these words."""
        return sum(of in line for line in self.log.read_text(errors="replace").splitlines())


class Fleet:
    """All of them; a context manager that ends them.

    Args:
        way: by which pages go: "transfer", "disk" or "store".
        folder: for logs, and a directory of pages.
        model: options that name it; ``each``: further ones of each node.
    """

    def __init__(
        self, way: str, folder: Path, model: Sequence[str], each: Sequence[str] = ()
    ) -> None:
        self._folder, self.all = folder, dict[str, Process]()
        ports = free_ports(len(NODES) + 3)
        shared = {
            "transfer": ["--kv-transfer", "127.0.0.1", "--kv-transfer-gib", "0.1"],
            "disk": ["--kv-disk", str(folder / "kv"), "--kv-transfer", "off"],
            "store": ["--kv-store", f"mooncake://127.0.0.1:{ports[-1]}", "--kv-store-gib", "0.1"],
        }[way]
        try:
            if way == "store":
                self._add_master(ports[-1], ports[-2])
            for (name, role), port in zip(NODES.items(), ports, strict=False):
                self._serve(name, role, port, [*model, *each, *shared, "--role", role])
            for name in NODES:
                self.all[name].wait()
            given = [
                word
                for name, role in NODES.items()
                for word in (f"--{role}-node", f"{name}={self.all[name].url}")
            ]
            self._serve("router", "router", ports[-3], [*model, *given, "--role", "router"])
            self.all["router"].wait()
        except BaseException:
            self.close()
            raise

    @property
    def router(self) -> Process:
        return self.all["router"]

    def of(self, role: str) -> list[Process]:
        """Those of a role."""
        return [each for each in self.all.values() if each.role == role]

    @property
    def moved(self) -> int:
        """Blocks that the nodes have read that are not their own, since each began."""
        with suppress(httpx2.HTTPError, ValueError, KeyError):
            return sum(level["read"] for level in self._figures()["kv_levels"].values())
        return 0

    def is_taken(self, name: str) -> bool:
        """Whether the router gives requests to a node."""
        with suppress(httpx2.HTTPError, ValueError, KeyError):
            nodes = self._figures()["nodes"]
            return any(node["name"] == name and node["up"] for node in nodes)
        return False

    def _figures(self) -> dict[str, Any]:
        url = f"{self.router.url}/v1/pykernels/figures"
        found: dict[str, Any] = httpx2.get(url, timeout=5, trust_env=False).json()
        return found

    def close(self) -> None:
        """Kills what is left."""
        for each in self.all.values():
            each.kill()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, name: str, role: str, port: int, options: Sequence[str]) -> None:
        command = serve_command(port, options)
        self.all[name] = Process(name, role, command, port, self._folder / f"{name}.log")

    def _add_master(self, port: int, metrics: int) -> None:
        program = shutil.which("mooncake_master")
        if program is None:
            raise PykernelsError("there is no mooncake_master", "Install pykernels[mooncake]")
        where = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        command = [program, *where, f"--rpc_port={port}", f"--metrics_port={metrics}"]
        log = self._folder / "master.log"
        self.all["master"] = Process("master", "master", command, port, log)
        self.all["master"].wait()


def serve_command(port: int, options: Sequence[str]) -> list[str]:
    """`pykernels serve` at a port of this machine."""
    return [sys.executable, "-m", "model.cli.main", "serve", "--port", str(port), *options]


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at, below those that the system gives to clients.

    They are others each time: a process that is killed leaves its port to its next life.
    """
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
                found.append(port)
            except OSError:
                continue
        if len(found) == count:
            return found
    raise PykernelsError(f"there are no {count} free ports", "Stop what listens at them")
