"""Which experts the tokens of an answer used, as JSON beside the answer."""

from __future__ import annotations

from typing import Any

from ...text.detokenize import token_bytes
from ..serving.fields import Strict
from ..serving.generation import Generation
from ..serving.served import Served


class Extension(Strict):
    """The field `pykernels` of a request: what is told beside an answer."""

    routed_experts: bool = False


class ExpertsTold:
    """Tells what is new of each output whenever it is asked.

    Args:
        asked: the request's field; without it nothing is told.
    """

    def __init__(self, served: Served, asked: Extension | None) -> None:
        self._tokenizer = served.model.tokenizer
        self._on = asked is not None and asked.routed_experts
        self._told: dict[int, int] = {}

    def new(self, generation: Generation, output: int) -> dict[str, Any] | None:
        """Tokens that were computed since the last call, the prompt's too; None if there are none.

        ``start`` is the first one's position; ``ids`` are [tokens][layers][experts], and so are
        ``weights``. Prompt tokens that were found in the cache are left out, and so is the last
        drawn token: neither was computed.
        """
        request = generation.handle.requests[output]
        if not self._on or request.routing is None:
            return None
        routed = request.routing.since(self._told.get(output, 0))
        if not len(routed.ids):
            return None
        self._told[output] = self._told.get(output, 0) + len(routed.ids)
        tokens = request.tokens[routed.first : routed.first + len(routed.ids)]
        return {
            "routed_experts": {
                "start": routed.first,
                "prompt_tokens": generation.prompt_tokens,
                "tokens": [self._text(token) for token in tokens],
                "ids": routed.ids.tolist(),
                "weights": [
                    [[round(weight, 4) for weight in layer] for layer in token]
                    for token in routed.weights.tolist()
                ],
            }
        }

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return str(token)
        return token_bytes(self._tokenizer, token).decode("utf-8", "replace")
