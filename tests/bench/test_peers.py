"""The wire between us and a peer, with small stand-ins for the peer's process; the peers' math."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import catalog, client, engines, install
from bench.peers.catalog import PEERS
from bench.peers.client import PeerMissing, PeerProcess
from bench.peers.driver import serve
from bench.peers.engines import ENGINES, Shape
from bench.peers.llama_cpp import BLOCKS, random_rows
from pykernels.shapes import MoEShape

from .stand_ins import stand_in

SHAPE = MoEShape(E=4, H=64, I=32, topk=2)
KT = next(peer for peer in PEERS if peer.name == "kt-kernel fp8")
TORCH = next(peer for peer in PEERS if peer.name == "torch bf16")


def process(command: list[str]) -> PeerProcess:
    return PeerProcess(TORCH, SHAPE, 1, 1, 4, command=command)


def test_requests_are_answered_and_a_peer_is_stopped_between_turns() -> None:
    peer = process(stand_in('say(calls=[[0, request["seconds"]], [1, 0.5]])'))
    try:
        assert peer.versions == {"it": "1"}
        assert peer.turn(0.25) == [(0, 0.25), (1, 0.5)]
        state = Path(f"/proc/{peer._process.pid}/stat")
        for _ in range(100):
            if state.read_text().rpartition(")")[2].split()[0] == "T":
                break
            time.sleep(0.01)
        else:
            raise AssertionError("the peer runs while it is not its turn")
    finally:
        peer.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(60)", "no answer for 0 s"),
        ("say(error='ValueError: no')", "ValueError: no"),
        ("sys.exit('bad luck')", "exit code 1: bad luck"),
        ("import os; os.kill(os.getpid(), 4)", "signal 4"),
        ("import os; os.close(1); time.sleep(60)", "it closed its output"),
        ("print('hello', flush=True)", "does not speak the protocol"),
        (r"sys.stdout.buffer.write(b'\xff\xfe\n'); sys.stdout.flush()", "not speak the protocol"),
        ("say(calls=[])", "does not speak the protocol"),
        ("say(calls=[['zero', 1.0]])", "does not speak the protocol"),
        ("say(calls=[[0, 0.0]])", "does not speak the protocol"),  # which took no time
    ],
)
def test_a_peer_that_fails_is_ended_and_keeps_its_reason(
    body: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither runs on beside the others' turns nor answers a later request with an old reply."""
    monkeypatch.setattr(client, "REPLY_SECONDS", 0.4)
    monkeypatch.setattr(client, "END_SECONDS", 0.4)
    peer = process(stand_in(body))
    for _ in range(2):
        with pytest.raises(PeerMissing, match=reason):
            peer.turn(0.1)
        assert peer._process.poll() is not None
    peer.close()


def test_results_with_infinities_are_a_reason() -> None:
    peer = process(stand_in("say(finite=False)"))
    with pytest.raises(PeerMissing, match="infinities or NaNs"):
        peer.prepare(1, [[0, 1]])
    peer.close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (r"import sys; print('a frame\nOSError: no room', file=sys.stderr); exit(3)",
         "exit code 3: OSError: no room"),
        (r"import sys; sys.stderr.buffer.write(b'caf\xe9 shut\n'); exit(3)", "3: caf. shut"),
        ("print('{}', flush=True); input()", "does not speak the protocol"),
    ],
)  # fmt: skip
def test_a_peer_that_does_not_start_is_missing(code: str, reason: str) -> None:
    with pytest.raises(PeerMissing, match=reason):
        process([sys.executable, "-c", code])


def test_a_peer_that_is_not_installed_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or was, by a Python that is gone."""
    monkeypatch.setattr(client, "VENVS", tmp_path)
    with pytest.raises(PeerMissing, match=r"not installed: python -m bench\.peers\.install"):
        PeerProcess(KT, SHAPE, 1, 1, 4)
    (tmp_path / "kt-kernel/bin").mkdir(parents=True)
    (tmp_path / "kt-kernel/pins.json").touch()
    (tmp_path / "kt-kernel/bin/python").symlink_to(tmp_path / "gone")
    with pytest.raises(PeerMissing, match=r"cannot be started: .*python -m bench\.peers\.install"):
        PeerProcess(KT, SHAPE, 1, 1, 4)


def test_a_peer_is_installed_again_where_its_pins_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(install.venv, "create", lambda folder, **_: made.append(folder))
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: tmp_path.mkdir(exist_ok=True))
    for pins, times in ((install.LLAMA_CPP, 1), (install.LLAMA_CPP, 1), (install.KT_KERNEL, 2)):
        install.make_venv(tmp_path, pins)
        assert made == [tmp_path] * times
    assert install.main(["kt-kernel", "vllm"]) == 2
    assert capsys.readouterr().err == "error: no peer 'vllm'. Use kt-kernel or llama.cpp.\n"


class Fake:
    """An engine that notes the (routing, layer) of its calls."""

    calls: list[tuple[int, int]] = []

    def __init__(self, mode: str, shape: Shape, threads: int, layers: int, most: int) -> None:
        assert (shape, threads, layers, most) == (Shape(4, 64, 32, 2), 1, 2, 4)
        self.calls.clear()

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        if tokens > 4:
            raise ValueError("too many\ntokens")

    def call(self, routing: int, layer: int) -> None:
        self.calls.append((routing, layer))

    def finite(self) -> bool:
        return True


def test_the_driver_rotates_routings_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "fake", Fake)
    monkeypatch.setattr("bench.peers.driver.versions", lambda engine: {engine: "1"})

    def served(*requests: dict[str, Any]) -> list[dict[str, Any]]:
        replies = io.StringIO()
        lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
        serve("fake", "any", [1, 2, 4, 4, 64, 32, 2], lines, replies)
        return [json.loads(line) for line in replies.getvalue().splitlines()]

    prepare = {"op": "prepare", "tokens": 1, "ids": [[0, 1], [2, 3], [0, 3]]}
    ready, prepared, turned = served(prepare, {"op": "turn", "seconds": 10.0, "most": 3})
    assert ready == {"ready": True, "versions": {"fake": "1"}} and prepared == {"finite": True}
    assert [routing for routing, _ in turned["calls"]] == [0, 1, 1]
    assert Fake.calls == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(served(prepare, {"op": "turn", "seconds": 0.0, "most": 9})[-1]["calls"]) == 1
    *_, last = served({"op": "prepare", "tokens": 5, "ids": [[0]]})
    assert last == {"error": "ValueError: too many tokens"}


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_torch_peer_computes_the_experts(mode: str) -> None:
    import torch

    threads = torch.get_num_threads()
    try:
        made = ENGINES["torch"](mode, Shape(4, 64, 32, 2), 1, 1, 4)
        made.prepare(3, [[0, 1, 2, 3, 0, 2]])
        made.call(0, 0)
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    gate_up, down = (matrix[0].float() for matrix in made.layers[0])  # all experts are alike
    gate, up = (made.x.float() @ gate_up.T).chunk(2, -1)
    want = (torch.nn.functional.silu(gate) * up) @ down.T * made.weights.float().sum(1)[:, None]
    assert torch.allclose(made.y.float(), want, atol=0.03 * float(want.abs().max()))


def test_numpy_peer_computes_the_experts() -> None:
    import numpy as np

    made = ENGINES["numpy"]("fp32", Shape(4, 64, 32, 2), 1, 1, 1)
    made.prepare(1, [[3, 1]])
    made.call(0, 0)
    gate_up, down = (matrix[0] for matrix in made.layers[0])
    gate, up = np.split(gate_up @ made.x, 2)
    want = down @ (gate / (1 + np.exp(-gate)) * up) * made.weights.sum()
    np.testing.assert_allclose(made.y, want, rtol=1e-3, atol=1e-4)


def test_llama_cpps_blocks_are_as_large_as_the_catalog_says() -> None:
    theirs = [peer for peer in PEERS if peer.engine == "llama.cpp"]
    assert {peer.mode for peer in theirs} == set(BLOCKS)
    assert set(catalog.ENGINES) == set(ENGINES)
    for peer in theirs:
        block = BLOCKS[peer.mode]
        assert peer.bytes_per_weight == block.nbytes / block.weights
        rows = random_rows(block, 32, 512, 2)
        assert rows.shape == (2, 32, 512 * block.nbytes // block.weights)


class FakeKt:
    """A kt-kernel whose layers take ``loads`` bytes each; ``resident`` is what it has."""

    def __init__(self, loads: list[int]) -> None:
        self.resident, self._loads = 1000, iter(loads)
        self.kt_kernel_ext = self
        self.moe = SimpleNamespace(
            MOEConfig=lambda *sizes: SimpleNamespace(), AMXBF16_MOE=self._layer
        )
        self.WorkerPoolConfig = SimpleNamespace

    def CPUInfer(self, workers: Any) -> Any:  # noqa: N802 - its name there
        return SimpleNamespace(backend_=None, submit=lambda task: task(), sync=lambda: None)

    def _layer(self, config: Any) -> Any:
        return SimpleNamespace(load_weights_task=lambda order: self._load)

    def _load(self) -> None:
        self.resident += next(self._loads)


@pytest.mark.parametrize("loads", [(2.0, 2.0, 2.0), (2.0, 2.0, 0.0)])
def test_kt_kernel_must_have_every_expert_in_memory(
    loads: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be timed on weights that it shares between layers: from cache."""
    shape = Shape(4, 64, 32, 2)
    fake = FakeKt([int(3 * shape.E * shape.H * shape.I * of_weight) for of_weight in loads])
    monkeypatch.setattr(engines, "import_module", lambda name: fake)
    monkeypatch.setattr(engines, "_resident", lambda: fake.resident)
    if loads[2]:
        assert len(ENGINES["kt-kernel"]("bf16", shape, 1, 3, 1).layers) == 3
    else:
        with pytest.raises(RuntimeError, match="not every expert is in memory"):
            ENGINES["kt-kernel"]("bf16", shape, 1, 3, 1)
