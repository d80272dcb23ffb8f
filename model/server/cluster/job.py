"""One prompt at a router, until all its outputs have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from runtime.engine import SamplingParams
from runtime.engine.requests.request import Request, State, fork_seed
from runtime.kv_tiers.transfer.endpoint import Peer

from .protocol import params_body


@dataclass(eq=False)
class Job:
    """One prompt.

    Attributes:
        keys: of its full pages that may come from elsewhere.
        peers: memory of nodes that have pages of it, the one with most of them first.
        cached: tokens that nobody had to compute; None: the node that writes the answer knows.
        began: when it was submitted.
    """

    prompt: list[int]
    params: SamplingParams
    grammar: str | None
    special: tuple[str, ...]
    requests: list[Request]
    keys: list[str]
    began: float = field(default_factory=time.monotonic)
    cached: int | None = None
    peers: list[Peer] = field(default_factory=list)

    def open(self, outputs: Sequence[int]) -> list[int]:
        """Those that have not ended."""
        return [o for o in outputs if self.requests[o].state is not State.FINISHED]

    def drawn(self, outputs: Sequence[int]) -> int:
        """Tokens of these outputs."""
        return sum(self.requests[output].num_output_tokens for output in outputs)

    def body(self, outputs: Sequence[int]) -> dict[str, Any]:
        """What a node is asked for: all outputs from their beginning, or one from where it is."""
        params, drawn = self.params, list[int]()
        if params.deadline is not None:
            left = params.deadline - (time.monotonic() - self.began)
            params = replace(params, deadline=max(left, 0.001))
        if len(outputs) < params.n or self.requests[outputs[0]].num_output_tokens:
            (output,) = outputs
            request = self.requests[output]
            drawn = list(request.output)
            seed = fork_seed(params.seed or 0, output)
            told = bool(request.prompt_logprobs)
            start = None if told else params.logprob_start
            params = replace(params, n=1, seed=seed, logprob_start=start)
        return {
            "prompt": self.prompt,
            "params": params_body(params),
            "grammar": self.grammar,
            "special": self.special,
            "drawn": drawn,
            "peers": self._peers,
        }

    def prefill_body(self) -> dict[str, Any]:
        """What a node is asked for that only reads it."""
        asked = {"prompt": self.prompt, "keys": self.keys, "peers": self._peers}
        return {**asked, "priority": self.params.priority}

    @property
    def _peers(self) -> list[dict[str, Any]]:
        return [asdict(peer) for peer in self.peers]
