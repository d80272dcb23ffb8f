"""Drafts: tokens that may come next, all of which one step checks (Leviathan et al., ICML 2023).

A step computes a sequence's last token and its drafts, and draws a token behind each, as it would
behind the same tokens without drafts: random numbers go by a sequence's seed and the number of the
token. So drafts are accepted as far as they are what was drawn, one token more comes with them, and
the text is the same with any drafts and with none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pykernels.errors import PykernelsError

from ...kv_cache import BlockManager
from ...runner.batch import Runner
from ..requests.drafters import MakeDrafter
from ..requests.request import Request, State
from .draft_limits import check_drafts
from .step import ScheduledStep


def check_taken_back(runner: Runner) -> None:
    """Raises PykernelsError where a runner cannot take back the drafts that it refuses; weights
    need not be there yet."""
    if reason := runner.why_no_drafts:
        raise PykernelsError(f"no drafts: {reason}", "Leave draft at off")


class Drafts:
    """Which drafts the sequences of a step have.

    Args:
        make: makes the drafter of a request.
        most: of a sequence in a step.
        lost: the errors of drafters are put here, by request.

    Raises:
        PykernelsError: a step of the runner has no room for so many, or cannot take them back.
    """

    def __init__(
        self, make: MakeDrafter, most: int, runner: Runner, lost: dict[Request, Exception]
    ) -> None:
        self._make, self._most, self._vocab_size = make, most, runner.vocab_size
        self._lost = lost
        check_taken_back(runner)
        check_drafts(most, runner)

    def add(self, request: Request) -> None:
        """Called once for each request."""
        try:
            request.drafter = self._make()
        except Exception as error:  # it fails alone, with its first token
            self._lost[request] = error

    def propose(self, decoding: Iterable[Request]) -> dict[Request, list[int]]:
        """What the drafters say, of those that say anything."""
        proposed = ((r, self._proposed(r, r.tokens, r.most_drafts)) for r in decoding)
        return {request: drafts for request, drafts in proposed if drafts}

    def any_behind(self, step: ScheduledStep, sampled_token_ids: Sequence[int]) -> bool:
        """Whether there will be drafts behind what a step has drawn, while the next step is
        scheduled already, without any."""
        for request, row in zip(step.sampled, step.rows, strict=True):
            most = request.most_drafts + 1  # that step has taken one
            if request.state is State.RUNNING and most > 1:
                if self._proposed(request, [*request.tokens, sampled_token_ids[row]], most):
                    return True
        return False

    def _proposed(self, request: Request, tokens: Sequence[int], most: int) -> list[int]:
        most = min(self._most, most)
        if request.drafter is None or most <= 0:
            return []
        try:
            drafts = list(request.drafter.propose(tokens, most)[:most])
        except Exception as error:  # it fails alone, with its next token
            request.drafter, self._lost[request] = None, error
            return []
        for i, token in enumerate(drafts):
            if not 0 <= token < self._vocab_size:  # it is never drawn, nor is what follows
                return drafts[:i]
        return drafts

    def fitting(
        self,
        manager: BlockManager,
        decoding: Sequence[Request],
        proposed: dict[Request, list[int]],
        rows: int,
    ) -> dict[Request, list[int]]:
        """What fits of the drafts, with pages for them.

        Args:
            manager: that takes the pages.
            decoding: all requests that decode in the step, each with a page for its token.
            rows: drafts of the step, at most.
        """
        page_size, fits = manager.page_size, dict[Request, list[int]]()
        for request in decoding:
            drafts = proposed.get(request, [])[: max(0, rows)]
            places = len(request.table.pages) * page_size - request.computed - 1
            # One page must be left for each of the others: drafts preempt nobody.
            while places < len(drafts) and manager.available > len(decoding):
                if not manager.extend(request.table):
                    break
                places += page_size
            if drafts := drafts[:places]:
                fits[request] = drafts
                rows -= len(drafts)
        return fits
