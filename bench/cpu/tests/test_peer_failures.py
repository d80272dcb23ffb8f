"""Peers that break the protocol or die: each is a reason in the table, and the run goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cpu.turns import alternate
from bench.peers import client
from bench.peers.catalog import PEERS
from bench.peers.client import PeerMissing, PeerProcess
from pykernels.shapes import MoEShape

from .stand_ins import stand_in

SHAPE = MoEShape(E=4, H=64, I=32, topk=2)
KT = next(peer for peer in PEERS if peer.name == "kt-kernel fp8")
TORCH = next(peer for peer in PEERS if peer.name == "torch bf16")


def process(command: list[str]) -> PeerProcess:
    return PeerProcess(TORCH, SHAPE, 1, 1, 4, command=command)


@pytest.mark.parametrize(
    "body",
    [
        r"sys.stdout.buffer.write(b'\xff\xfe\n'); sys.stdout.flush()",
        "say(other=1)",
        "say(calls=[], finite=None)",
        "say(calls=7, finite='yes')",
        "say(calls=[[0]], finite=[])",
        "say(calls=[['zero', 1.0]], finite=0)",
        "say(calls=[[0, 0.0]], finite=1)",
    ],
)
@pytest.mark.parametrize("op", ["prepare", "turn"])
def test_an_answer_of_another_kind_is_a_reason(body: str, op: str) -> None:
    peer = process(stand_in(body))
    try:
        with pytest.raises(PeerMissing, match="does not speak the protocol"):
            peer.prepare(1, [[0, 1]]) if op == "prepare" else peer.turn(0.1)
    finally:
        peer.close()


@pytest.mark.parametrize("said", ["{}", '{"versions": 3}'])
def test_a_peer_that_begins_with_another_answer_is_missing(said: str) -> None:
    with pytest.raises(PeerMissing, match="does not speak the protocol"):
        process([sys.executable, "-c", f"print({said!r}, flush=True); input()"])


def test_of_a_traceback_the_last_line_is_told() -> None:
    code = r"import sys; print('Traceback:\n a frame\nOSError: no room', file=sys.stderr); exit(3)"
    with pytest.raises(PeerMissing, match="exit code 3: OSError: no room"):
        process([sys.executable, "-c", code])


def test_a_peer_has_its_own_threads_and_no_ctrl_c_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "cores")  # what suits our threads may not suit its
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    says = "{k: v for k, v in os.environ.items() if k[:4] in ('OMP_', 'KMP_')}"
    code = f"import json, os; print(json.dumps(dict(versions={says} | dict(of=os.getsid(0)))))"
    peer = process([sys.executable, "-c", f"{code}; import time; time.sleep(60)"])
    try:
        assert peer.versions == {"OMP_NUM_THREADS": "1", "of": str(peer._process.pid)}
    finally:
        peer.close()


def test_last_words_in_another_encoding_are_shown_as_far_as_they_go() -> None:
    code = r"import sys; sys.stderr.buffer.write(b'caf\xe9 is closed\n'); sys.exit(3)"
    with pytest.raises(PeerMissing, match="exit code 3: caf. is closed"):
        process([sys.executable, "-c", code])


def test_a_peer_whose_python_is_gone_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment was made by a Python that is no longer installed."""
    monkeypatch.setattr(client, "VENVS", tmp_path)
    (tmp_path / "kt-kernel/bin").mkdir(parents=True)
    (tmp_path / "kt-kernel/pins.json").touch()
    (tmp_path / "kt-kernel/bin/python").symlink_to(tmp_path / "gone")
    with pytest.raises(PeerMissing, match=r"cannot be started: .*python -m bench\.peers\.install"):
        PeerProcess(KT, SHAPE, 1, 1, 4)


def test_a_peer_that_died_between_turns_is_closed_without_another_error() -> None:
    peer = process(stand_in("say(calls=[[0, 1.0]])"))
    peer._process.kill()
    peer._process.wait()
    with pytest.raises(PeerMissing, match="signal 9"):
        peer.turn(0.1)
    peer.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(60)", "no answer for 0 s"),
        ("say(error='ValueError: no')", "ValueError: no"),
        ("import os; os.close(1); time.sleep(60)", "it closed its output"),
    ],
)
def test_a_peer_that_failed_is_ended_and_keeps_its_reason(
    body: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither runs on beside the others' turns nor answers a later request with an old reply."""
    monkeypatch.setattr(client, "REPLY_SECONDS", 0.2)
    monkeypatch.setattr(client, "END_SECONDS", 0.2)
    peer = process(stand_in(body))
    for _ in range(2):
        with pytest.raises(PeerMissing, match=reason):
            peer.turn(0.1)
        assert peer._process.poll() is not None
    peer.close()


def test_the_others_go_on_without_a_peer_that_dies() -> None:
    ours: Any = SimpleNamespace(turn=lambda seconds, most=1000: [(0, 1.0)])
    peer = process(stand_in("say(calls=[[0, 1.0]]) if request['seconds'] == 0 else sys.exit('no')"))
    try:
        seen = alternate({"ours": ours, "peer": peer}, None, 3, 0.01)
    finally:
        peer.close()
    assert len(seen["ours"].rounds) == 3 and not seen["ours"].why
    assert "exit code 1: no" in seen["peer"].why
