"""The wire between us and a peer, with small stand-ins for the peer's process."""

from __future__ import annotations

import io
import json
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import catalog, client, engines, install, llama_cpp
from bench.peers.catalog import PEERS, Peer
from bench.peers.client import PeerMissing, PeerProcess, parse, python_of
from bench.peers.driver import Turns, serve
from bench.peers.engines import ENGINES, Shape
from bench.peers.llama_cpp import BLOCKS, random_rows
from pykernels.quant import FORMATS
from pykernels.shapes import MoEShape

from .stand_ins import stand_in

SHAPE = MoEShape(E=4, H=64, I=32, topk=2)
KT = next(peer for peer in PEERS if peer.name == "kt-kernel fp8")
TORCH = next(peer for peer in PEERS if peer.name == "torch bf16")


def process(command: list[str]) -> PeerProcess:
    return PeerProcess(TORCH, SHAPE, 1, 1, 4, command=command)


def test_every_format_has_a_peer_of_its_like() -> None:
    assert {fmt for fmt in FORMATS if not any(fmt in peer.formats for peer in PEERS)} == set()
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    assert set(catalog.ENGINES) == set(ENGINES)


def test_llama_cpps_blocks_are_as_large_as_the_catalog_says() -> None:
    theirs = [peer for peer in PEERS if peer.engine == "llama.cpp"]
    assert {peer.mode for peer in theirs} == set(BLOCKS)
    for peer in theirs:
        block = BLOCKS[peer.mode]
        assert peer.bytes_per_weight == block.nbytes / block.weights
        rows = random_rows(block, 32, 512, 2)
        assert rows.shape == (2, 32, 512 * block.nbytes // block.weights)
        assert (rows[0] == rows[1]).all()


def test_a_format_is_held_against_its_like_and_the_general_peers() -> None:
    assert [p.name for p in PEERS if p.matches("fp8", 1)] == [
        "kt-kernel fp8", "torch bf16", "torch fp32", "numpy fp32",
    ]  # fmt: skip
    assert not any(p.engine == "numpy" for p in PEERS if p.matches("fp8", 2))


@pytest.mark.parametrize(
    ("most", "E", "held"), [(0, 256, 256), (1, 32, 16), (1, 8, 8), (8, 32, 32)]
)
def test_a_peer_of_short_calls_holds_experts_for_two_of_them(most: int, E: int, held: int) -> None:
    assert Peer("numpy", "fp32", 4.0, max_tokens=most).experts(E, topk=8) == held


def test_requests_are_answered() -> None:
    peer = process(stand_in('say(calls=[[0, request["seconds"]], [1, 0.5]])'))
    try:
        assert peer.versions == {"it": "1"}
        assert peer.turn(0.25) == [(0, 0.25), (1, 0.5)]
    finally:
        peer.close()


def test_a_peer_is_stopped_between_turns() -> None:
    peer = process(stand_in("say(calls=[[0, 1.0]])"))
    try:
        peer.turn(0.0)
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
        ("say(error='ValueError: no')", "ValueError: no"),
        ("sys.exit('bad luck')", "exit code 1: bad luck"),
        ("import os; os.kill(os.getpid(), 4)", "signal 4"),
        ("print('hello', flush=True)", "does not speak the protocol"),
        ("say(finite=False)", "infinities or NaNs"),
    ],
)
def test_a_failure_becomes_a_reason(body: str, reason: str) -> None:
    peer = process(stand_in(body))
    try:
        with pytest.raises(PeerMissing, match=reason):
            peer.prepare(1, [[0, 1]])
    finally:
        peer.close()


def test_a_peer_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REPLY_SECONDS", 0.2)
    peer = process(stand_in("time.sleep(60)"))
    try:
        with pytest.raises(PeerMissing, match="no answer for 0 s"):
            peer.turn(0.1)
    finally:
        peer.close()


def test_a_peer_that_never_starts_is_missing() -> None:
    with pytest.raises(PeerMissing, match="exit code 3: no module"):
        process([sys.executable, "-c", "import sys; print('no module', file=sys.stderr); exit(3)"])


def test_only_known_peers_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["kt-kernel", "vllm"]) == 2
    assert capsys.readouterr().err == "error: no peer 'vllm'. Use kt-kernel or llama.cpp.\n"


def test_a_peer_is_installed_again_where_its_pins_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(install.venv, "create", lambda folder, **_: made.append(folder))
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: tmp_path.mkdir(exist_ok=True))
    for pins, times in ((install.LLAMA_CPP, 1), (install.LLAMA_CPP, 1), (install.KT_KERNEL, 2)):
        install.make_venv(tmp_path, pins)
        assert made == [tmp_path] * times


def test_lines_are_parsed() -> None:
    assert parse('{"calls": []}') == {"calls": []}
    for bad in ("", "[1]", "{"):
        with pytest.raises(PeerMissing, match="protocol"):
            parse(bad)


def test_a_peer_that_is_not_installed_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "VENVS", tmp_path)
    with pytest.raises(PeerMissing, match=r"not installed: python -m bench\.peers\.install"):
        python_of(KT)
    (tmp_path / "kt-kernel/packages").mkdir(parents=True)
    python, extra = python_of(KT)
    assert python == Path(sys.executable)
    assert extra == {"PYTHONPATH": str(tmp_path / "kt-kernel/packages")}


def served(engine: str, mode: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies of a driver in this process."""
    replies = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    serve(engine, mode, [1, 2, 4, 4, 64, 32, 2], lines, replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """An engine called "fake" that notes the (routing, layer) of its calls."""
    calls: list[tuple[int, int]] = []

    class Fake:
        def __init__(self, mode: str, shape: Shape, threads: int, layers: int, most: int) -> None:
            assert (shape, threads, layers, most) == (Shape(4, 64, 32, 2), 1, 2, 4)

        def prepare(self, tokens: int, ids: list[list[int]]) -> None:
            if tokens > 4:
                raise ValueError("too many\ntokens")

        def call(self, routing: int, layer: int) -> None:
            calls.append((routing, layer))

        def finite(self) -> bool:
            return True

    monkeypatch.setitem(ENGINES, "fake", Fake)
    monkeypatch.setattr("bench.peers.driver.versions", lambda engine: {engine: "1"})
    return calls


def test_driver_rotates_routings_and_layers(fake_engine: list[tuple[int, int]]) -> None:
    prepare = {"op": "prepare", "tokens": 1, "ids": [[0, 1], [2, 3], [0, 3]]}
    turn = {"op": "turn", "seconds": 10.0, "most": 3}
    ready, prepared, turned = served("fake", "any", [prepare, turn])
    assert ready == {"ready": True, "versions": {"fake": "1"}}
    assert prepared == {"finite": True}
    assert [routing for routing, _ in turned["calls"]] == [0, 1, 1]
    assert fake_engine == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_driver_tells_errors_in_one_line(fake_engine: list[tuple[int, int]]) -> None:
    *_, last = served("fake", "any", [{"op": "prepare", "tokens": 5, "ids": [[0]]}])
    assert last == {"error": "ValueError: too many tokens"}
    *_, last = served("fake", "any", [{"op": "dance"}])
    assert last == {"error": "ValueError: unknown op 'dance'"}


@pytest.mark.parametrize(("engine", "mode"), [("torch", "bf16"), ("torch", "fp32")])
def test_torch_peer_computes_the_experts(engine: str, mode: str) -> None:
    import torch

    threads = torch.get_num_threads()
    try:
        made = ENGINES[engine](mode, Shape(4, 64, 32, 2), 1, 1, 4)
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


class FakeGgml:
    """Takes every call; weights that it is given go nowhere."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *given: []) if name == "extra_buffers" else lambda *given: 1


@pytest.mark.parametrize("mode", ["bf16", "q4_k"])
def test_llama_cpp_takes_no_more_while_loading_than_the_catalog_says(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "Ggml", FakeGgml)
    shape = Shape(32, 512, 256, 2)
    of_expert = 3 * shape.H * shape.I
    peer = next(p for p in PEERS if p.name == f"llama.cpp {mode}")
    tracemalloc.start()
    try:
        ENGINES["llama.cpp"](mode, shape, 1, 2, 1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    of_layer = shape.E * of_expert * peer.loading
    assert of_layer < most < of_layer + 4.7 * of_expert  # and the first expert


class FakeKt:
    """A kt-kernel whose layers take ``loads`` bytes each; ``resident`` is what it has."""

    def __init__(self, loads: list[int]) -> None:
        self.resident, self._loads = 1000, iter(loads)
        self.kt_kernel_ext = self
        self.moe = SimpleNamespace(MOEConfig=self._config, AMXBF16_MOE=self._layer)
        self.WorkerPoolConfig = SimpleNamespace

    def CPUInfer(self, workers: Any) -> Any:  # noqa: N802 - its name there
        return SimpleNamespace(backend_=None, submit=lambda task: task(), sync=lambda: None)

    def _config(self, *sizes: int) -> Any:
        return SimpleNamespace()

    def _layer(self, config: Any) -> Any:
        return SimpleNamespace(load_weights_task=lambda order: self._load)

    def _load(self) -> None:
        self.resident += next(self._loads)


@pytest.mark.parametrize(
    ("loads", "complete"),
    [
        ((2.0, 2.0, 2.0), True),
        ((3.5, 0.5, 2.0), True),  # the second goes to pages that the first gave back
        ((2.0, 2.0, 0.0), False),
        ((1.0, 1.0, 1.0), False),
    ],
)
def test_kt_kernel_has_every_layer_in_memory(
    loads: tuple[float, ...], complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(4, 64, 32, 2)
    fake = FakeKt([int(3 * shape.E * shape.H * shape.I * of_weight) for of_weight in loads])
    monkeypatch.setattr(engines, "import_module", lambda name: fake)
    monkeypatch.setattr(engines, "_resident", lambda: fake.resident)
    if complete:
        assert len(ENGINES["kt-kernel"]("bf16", shape, 1, 3, 1).layers) == 3
    else:
        with pytest.raises(RuntimeError, match="not every expert is in memory"):
            ENGINES["kt-kernel"]("bf16", shape, 1, 3, 1)


def test_turns_do_at_least_one_call(fake_engine: list[tuple[int, int]]) -> None:
    turns = Turns(ENGINES["fake"]("any", Shape(4, 64, 32, 2), 1, 2, 4), 2)
    turns.answer({"op": "prepare", "tokens": 1, "ids": [[0, 1]]})
    assert len(turns.answer({"op": "turn", "seconds": 0.0, "most": 9})["calls"]) == 1


def test_peer_defaults() -> None:
    peer = Peer("torch", "bf16", 2.0)
    assert peer.matches("anything", 4096)
