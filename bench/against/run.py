"""A kernel of this source tree and that of a commit, in turns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pykernels.errors import PykernelsError

from .checked import Checked

ROOT = BENCH = Path(__file__).parents[2]
PACKAGES = "pykernels", "runtime"
"""What a player imports."""

TURN, ROUNDS = 0.06, 12


@dataclass(frozen=True)
class Against:
    """Rates of both, and how they compare.

    Attributes:
        revision: the commit's short name.
        gbps_before, gbps: medians over the calls, of the bytes that they must read (of the
            distinct experts, for one); in 1e9.
        tflops_before, tflops: by the median call.
        ratio: new over old rate, the median of rounds a fraction of a second long.
        ratio_low, ratio_high: of the rounds.
    """

    revision: str
    kernel: str
    threads: int
    gbps_before: float
    gbps: float
    tflops_before: float
    tflops: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def as_dict(self) -> dict[str, Any]:
        """Flat, for one line of JSON."""
        return asdict(self)


class _Player:
    """A process that times one tree's kernel; the pipes are closed by whoever made it."""

    def __init__(self, process: subprocess.Popen[str], name: str, case: dict[str, Any]) -> None:
        self._process, self._name = process, name
        self.rates: list[float] = []
        self.seconds: list[float] = []
        self._send(json.dumps(case))

    def checked(self) -> Checked:
        """How it compares with the reference, if it was told to."""
        return Checked(**self._answer())

    def ready(self) -> dict[str, Any]:
        """What it says of itself when its kernels are compiled."""
        return self._answer()

    def turn(self) -> float:
        """The median rate of some calls, in GB/s."""
        self._send(str(TURN))
        calls = self._answer()["calls"]
        rates = [nbytes / took / 1e9 for took, nbytes in calls]
        self.rates += rates
        self.seconds += [took for took, _ in calls]
        return median(rates)

    def _send(self, line: str) -> None:
        assert self._process.stdin
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            cause, hint = answer["refused"]
            raise PykernelsError(f"{self._name}: {cause}", hint)
        return answer

    def _ended(self) -> PykernelsError:
        return PykernelsError(
            f"{self._name} cannot be timed: its process ended with code {self._process.wait()}",
            "What it printed above says why",
        )


def run(
    revision: str,
    case: dict[str, Any],
    check: Callable[[Checked], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Against:
    """Times a case (``player``) in this tree and in a commit's.

    Args:
        check: called with how this tree's kernel compares with the reference, before it is timed;
            None: it is not compared.
        progress: called with what is being done.

    Raises:
        PykernelsError: no such commit, or one of both cannot run the case.
    """
    commit = _git("rev-parse", "--short", "--verify", f"{revision}^{{commit}}").decode().strip()
    with ExitStack() as stack:
        before_tree = stack.enter_context(_checked_out(commit))
        progress("filling random weights, compiling …")
        ours, theirs = case | {"check": check is not None}, case | {"check": False}
        now = stack.enter_context(_playing(ROOT, "the kernel here", ours))
        before = stack.enter_context(_playing(before_tree, f"that of {commit}", theirs))
        if check:
            check(now.checked())
        about, flops = now.ready(), before.ready()["flops"]
        progress("timing …")
        pairs = [(before.turn(), now.turn()) for _ in range(ROUNDS)]
    ratios = [new / old for old, new in pairs]
    return Against(
        revision=commit,
        kernel=about["kernel"],
        threads=about["threads"],
        gbps_before=round(median(before.rates), 2),
        gbps=round(median(now.rates), 2),
        tflops_before=round(flops / median(before.seconds) / 1e12, 4),
        tflops=round(about["flops"] / median(now.seconds) / 1e12, 4),
        ratio=round(median(ratios), 3),
        ratio_low=round(min(ratios), 3),
        ratio_high=round(max(ratios), 3),
    )


@contextmanager
def _playing(tree: Path, name: str, case: dict[str, Any]) -> Iterator[_Player]:
    """A player of a tree; it ends with the block."""
    with subprocess.Popen(
        # -P: else the folder of this file, and the one we are in, would be looked into first.
        [sys.executable, "-P", str(Path(__file__).with_name("player.py"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(BENCH)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        try:
            yield _Player(process, name, case)
        finally:
            process.kill()


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """A folder with a commit's packages."""
    packed = _git("archive", "--format=tar", commit, *PACKAGES)
    with tempfile.TemporaryDirectory(prefix="pykernels-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def _git(*arguments: str) -> bytes:
    """What git says of this tree.

    Raises:
        PykernelsError: there is no git, no repository, or not what was asked for.
    """
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    except FileNotFoundError:
        raise PykernelsError("--against needs git, which is not here", "Install git") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise PykernelsError(
            f"--against: {said[-1]}", "Name a commit, a branch or a tag of the repository, as HEAD"
        )
    return done.stdout
