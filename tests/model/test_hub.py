"""Models by name: a hub on loopback, what is fetched of it, and the cache without any network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from model import load_engine
from model.hub import name_of

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES: dict[str, bytes] = {}
ASKED: list[str] = []


class Hub(BaseHTTPRequestHandler):
    """The endpoints that huggingface_hub uses: a model's files, with sizes, and each file."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/")
        owner = path.removeprefix("api/models/").partition("/resolve/")[0]
        if not owner.startswith("owner/name"):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("api/models/owner/name/tree"):
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in FILES.items()
            ]
            return self._send(200, json.dumps(found).encode())
        if path.startswith("api/models/"):
            files = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            info = {"id": "owner/name", "sha": COMMIT, "siblings": files}
            return self._send(200, json.dumps(info).encode())
        name = path.partition("/resolve/")[2].partition("/")[2]
        if self.command == "GET":
            ASKED.append(name)
        data = FILES[name]
        self._send(200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT})

    def _send(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
import sys, warnings
from model.hub import local
from pykernels.errors import PykernelsError
warnings.simplefilter("ignore")
try:
    print(local(sys.argv[1], weights=sys.argv[2] == "weights"))
except PykernelsError as error:
    print(error, file=sys.stderr)
assert not {"torch", "transformers"} & sys.modules.keys()
"""


class Place:
    """A machine: its cache of the hub, with a network or without."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.flags = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
        self.flags["HF_HUB_DISABLE_XET"] = "1"

    def local(self, name: str, online: bool = True, weights: bool = True) -> tuple[str, str]:
        """What ``hub.local`` gives, and the error that it raises."""
        ASKED.clear()
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, name, "weights" if weights else "config"],
            cwd=ROOT,
            env=self.flags | {"HF_HUB_OFFLINE": "0" if online else "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stdout.strip(), ended.stderr.strip()


@pytest.fixture
def place(tmp_path: Path, endpoint: str) -> Place:
    FILES.clear()
    return Place(tmp_path / "home", endpoint)


def put(*names: str) -> None:
    FILES.update({name: name.encode() for name in names})


def test_only_the_files_that_are_read_are_fetched(place: Place) -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    read = ["config.json", "tokenizer.json", "model.safetensors.index.json", *shards]
    put(*read, "README.md", "original/model.safetensors", "consolidated.safetensors", "x.gguf")
    weight_map = {f"w{i}": shard for i, shard in enumerate(shards)}
    FILES["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    config, _ = place.local("owner/name", weights=False)
    assert Path(config).read_bytes() == b"config.json" and ASKED == ["config.json"]
    refused = place.local("owner/name", online=False)[1]
    assert "is not in the hub's cache" in refused
    assert "hf download owner/name --local-dir name" in refused
    folder, told = place.local("owner/name")
    assert sorted(os.listdir(folder)) == sorted(read), told
    assert sorted(ASKED) == sorted(set(read) - {"config.json"})
    assert name_of(Path(folder)) == "owner/name"
    assert place.local("owner/name", online=False) == (folder, "")
    shutil.rmtree(place.flags["HF_HOME"] + "/hub/models--owner--name/blobs")
    assert "is not in the hub's cache" in place.local("owner/name", online=False)[1]


def test_one_gguf_file_of_many_by_its_type_or_its_name(place: Place) -> None:
    split = [f"big/M-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    put("config.json", "M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "mmproj-Q8_0.gguf", *split)
    file, _ = place.local("owner/name:q4_k_m")
    assert Path(file).read_bytes() == b"M-Q4_K_M.gguf" and ASKED == ["M-Q4_K_M.gguf"]
    first, _ = place.local("owner/name:Q8_0")
    assert first.endswith(split[0]) and sorted(ASKED) == split
    for name in ("M-Q4_K_M.gguf", "Q4_K_M"):
        assert place.local(f"owner/name:{name}", online=False) == (file, "")
    assert place.local(f"owner/name:{split[0]}", online=False) == (first, "")
    assert "has 3 GGUF models: M-Q4_K_M.gguf, M-Q4_K_S.gguf, M-Q8_0" in place.local("owner/name")[1]
    assert "has no GGUF models of 'Q6_K'" in place.local("owner/name:Q6_K")[1]


def test_what_is_no_model_of_the_hub_is_one_line(place: Place, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("nowhere", f"{tmp_path}/models/absent", "no/such"):
        told = place.local(name)[1]
        assert told.startswith(f"There is no folder {name}") and "\n" not in told


def test_commands_and_the_engine_take_a_name(
    run: Run, writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    shutil.copytree(writer, model / "snapshots" / COMMIT)
    options = ("--max-new-tokens", 2, "--temperature", 0, "def")
    wanted = run("generate", "--model", writer, *options).out
    assert run("generate", "--model", "owner/name", *options).out == wanted
    with load_engine("owner/name") as llm:
        assert "def" + llm.generate("def", max_tokens=2, temperature=0).text + "\n" == wanted
    assert "from its headers" in run("inspect", "owner/name").out
    assert run("convert", "owner/name", tmp_path / "packed").code == 0
