"""Tries grammars in a process of their own, where a crash ends no server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pykernels.errors import PykernelsError

SECONDS = 2.0
"""CPU time that a grammar may take to compile."""
_PROGRAM = Path(__file__).with_name("trial_child.py")
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
SIMPLER = "Simplify the schema, regular expression or grammar"


class Trial:
    """A child process that is started for the first grammar and kept; after a crash comes another.

    It knows single bytes and the special tokens only, so that it starts in 0.2 s: the recursions
    of a compiler follow its grammar, not the vocabulary.

    Args:
        size: of the vocabulary.
        eos: ids of the tokens that end an output.
        special: texts of special tokens by id.
    """

    def __init__(self, size: int, eos: Sequence[int], special: Mapping[int, str]) -> None:
        facts = {"size": size, "eos": list(eos), "special": dict(special), "seconds": SECONDS}
        self._facts = json.dumps(facts)
        self._child: subprocess.Popen[bytes] | None = None
        self._finish: Callable[[], object] = lambda: None
        self._one_at_a_time = threading.Lock()

    def __call__(self, grammar: str) -> None:
        """Raises PykernelsError for a grammar that is wrong, takes too long or ends the process."""
        with self._one_at_a_time:
            child = self._running()
            try:
                _send(child, grammar)
                fault = _receive(child)
            except (OSError, EOFError):
                raise _refused(child.wait()) from None
        if fault:
            raise refused(fault)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._finish()
            self._child = None
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which ends it
            )
            self._finish = weakref.finalize(self, _end, self._child)
            with suppress(OSError):  # what has ended it shows when it is asked
                _send(self._child, self._facts)
        return self._child


def refused(fault: str) -> PykernelsError:
    """The error for a grammar of which llguidance says what is wrong, as its first line."""
    return PykernelsError(f"this structure cannot be enforced: {first_line(fault)}", SIMPLER)


def first_line(fault: str) -> str:
    """What llguidance says is wrong, without the inner state that follows."""
    cause = next((line.strip() for line in fault.splitlines() if line.strip()), "unknown")
    cause = _PLACE.sub("", cause)  # in a grammar that the request does not show
    return "nothing may come next" if cause.startswith("NoExtension") else cause[:300]


def _refused(status: int) -> PykernelsError:
    if status >= 0:
        return PykernelsError(
            f"the process that tries grammars has ended with status {status}",
            f"Run {sys.executable} {_PROGRAM} to see why",
        )
    if status == -signal.SIGPROF:
        cause = f"it takes more than {SECONDS:g} s to compile"
    else:
        cause = "it needs too deep a recursion or too much memory to compile"
    return PykernelsError(f"this structure cannot be enforced: {cause}", SIMPLER)


def _send(child: subprocess.Popen[bytes], text: str) -> None:
    assert child.stdin is not None
    data = text.encode()
    child.stdin.write(len(data).to_bytes(4, "little") + data)
    child.stdin.flush()


def _receive(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    head = child.stdout.read(4)
    if len(head) < 4:
        raise EOFError
    return child.stdout.read(int.from_bytes(head, "little")).decode()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):  # of what it has not read
                pipe.close()
