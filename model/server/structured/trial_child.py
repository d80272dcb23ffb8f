"""Compiles grammars that may end the process. A program of its own, which imports llguidance only.

Each message is its length (4 bytes, little endian) and UTF-8. The first is the vocabulary as JSON;
each further one is a grammar, whose answer is what is wrong with it, or nothing. The kernel ends
this process where a grammar takes too long, too much memory or too deep a stack.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from typing import Any

import llguidance

MARKER = b"\xff"
"""What llguidance wants in front of the text of a special token."""
MEMORY = 1 << 30
"""Bytes that this process may take beyond what it has at its start."""


class Tokens:
    """Single bytes and the special tokens, at ids below ``size``: what llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, eos: list[int], special: dict[int, str]) -> None:
        self.tokens = [b""] * size
        free = (i for i in range(size) if i not in special)
        self._ids = dict(zip(range(256), free, strict=False))
        for byte, token in self._ids.items():
            self.tokens[token] = bytes([byte])
        for token, text in special.items():
            self.tokens[token] = MARKER + text.encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos[0]

    def __call__(self, text: str) -> list[int]:
        return [self._ids[byte] for byte in text.encode()]


def fault_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    """Compiles a grammar and returns its error; "" if it compiles and some output may begin."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def _receive() -> str | None:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    return sys.stdin.buffer.read(int.from_bytes(head, "little")).decode()


def _send(text: str) -> None:
    data = text.encode()
    sys.stdout.buffer.write(len(data).to_bytes(4, "little") + data)
    sys.stdout.buffer.flush()


def _serve() -> None:
    facts: dict[str, Any] = json.loads(_receive() or "{}")
    special = {int(token): text for token, text in facts["special"].items()}
    tokens: Any = Tokens(facts["size"], facts["eos"], special)
    tokenizer = llguidance.LLTokenizer(tokens, n_vocab=facts["size"], eos_token=facts["eos"])
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    while (grammar := _receive()) is not None:
        signal.setitimer(signal.ITIMER_PROF, facts["seconds"])  # whose SIGPROF ends this process
        fault = fault_of(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(fault)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Half the stack that the server's threads have: what fits here fits there.
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    threading.stack_size((min(stack, 8 << 20) if stack > 0 else 2 << 20) // 2 & -(1 << 16))
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
