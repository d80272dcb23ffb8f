"""A grammar as the engine's constraint, by llguidance."""

from __future__ import annotations

import llguidance

from pykernels.errors import PykernelsError
from runtime.runner.constraint import Mask

from .trial import SIMPLER, first_line
from .vocabulary import Vocabulary


class GrammarConstraint:
    """Outputs that a grammar generates: a ``runtime.engine.Constraint``.

    Args:
        grammar: in llguidance's lark.

    Raises:
        PykernelsError: the grammar is wrong, or too large.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        self.grammar = grammar
        self._start = vocabulary.compile(grammar)

    def begin(self) -> GrammarFilter:
        """See ``runtime.engine.Constraint``."""
        return GrammarFilter(self._start.deep_copy())


class GrammarFilter:
    """Which tokens may come next: a ``runtime.engine.TokenFilter``."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may come."""
        return self._matcher.is_stopped()

    def allowed(self, mask: Mask) -> None:
        """See ``TokenFilter``. Where the output is complete the end tokens are allowed, too."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        """See ``TokenFilter``."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            cause = first_line(self._matcher.get_error())
            raise PykernelsError(f"the structure of the output was lost: {cause}", SIMPLER)
