"""Drafts: tokens that may come next, all of which one step checks (Leviathan et al., ICML 2023).

A step computes a sequence's last token and its drafts, and draws a token behind each, as it would
behind the same tokens without drafts: random numbers go by a sequence's seed and the number of the
token. So drafts are accepted as far as they are what was drawn, one token more comes with them, and
the text is the same with any drafts and with none.

With a ``DraftPolicy`` steps check those that are worth it; without one, all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pykernels.errors import PykernelsError

from ...kv_cache import BlockManager
from ...runner.batch import Runner
from ..requests.drafters import MakeDrafter
from ..requests.request import Request, State
from .config import EngineConfig
from .draft_limits import AUTO, check_drafts
from .draft_policy import DraftPolicy
from .step import ScheduledStep


def drafts_of(
    config: EngineConfig,
    make: MakeDrafter | None,
    runner: Runner,
    lost: dict[Request, Exception],
) -> Drafts | None:
    """The drafts that an engine is configured for; None: none, nor can a runner have any where it
    is left open.

    Args:
        make: in place of the configuration's drafters.
        lost: see ``Drafts``.

    Raises:
        PykernelsError: see ``Drafts``.
    """
    if make is None and config.draft == AUTO and why_none(config, runner):
        return None
    make = make or config.drafter
    policy = DraftPolicy(config.draft_times) if config.draft == AUTO else None
    if make is None:
        return None
    return Drafts(make, config.draft_tokens, runner, lost, policy, config.draft_step_tokens)


def why_none(config: EngineConfig, runner: Runner) -> str:
    """Why a runner cannot check drafts, as a clause; "": it can. Weights need not be there."""
    room = min(runner.max_num_batched_tokens, runner.max_num_logits)
    if config.draft_tokens >= room:
        return f"a step has room for {room} token{'s' * (room > 1)}"
    return runner.why_no_drafts


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
        policy: says which are worth checking; None: all are.
        step_tokens: of a step with drafts, at most; None: any number.

    Raises:
        PykernelsError: a step of the runner has no room for so many, or cannot take them back.
    """

    def __init__(
        self,
        make: MakeDrafter,
        most: int,
        runner: Runner,
        lost: dict[Request, Exception],
        policy: DraftPolicy | None = None,
        step_tokens: int | None = None,
    ) -> None:
        self._make, self._most, self._vocab_size = make, most, runner.vocab_size
        self._lost, self._policy = lost, policy
        self.step_tokens = runner.max_num_batched_tokens if step_tokens is None else step_tokens
        check_taken_back(runner)
        check_drafts(most, runner)

    def add(self, request: Request) -> None:
        """Called once for each request."""
        try:
            request.drafter = self._make()
        except Exception as error:  # it fails alone, with its first token
            self._lost[request] = error

    def propose(self, decoding: Sequence[Request]) -> dict[Request, list[int]]:
        """The drafts that are worth checking, by request; requests without any are left out."""
        may = [r for r in decoding if self.may_have(r, r.most_drafts, len(decoding))]
        proposed = ((r, self._proposed(r, r.tokens, r.most_drafts)) for r in may)
        return self._worth({r: drafts for r, drafts in proposed if drafts}, len(decoding))

    def any_behind(self, step: ScheduledStep, sampled_token_ids: Sequence[int]) -> bool:
        """Whether there will be drafts behind what a step has drawn, while the next step is
        scheduled already, without any."""
        found: dict[Request, list[int]] = {}
        for request, row in zip(step.sampled, step.rows, strict=True):
            most = request.most_drafts + 1  # that step has taken one
            if request.state is State.RUNNING and most > 1:
                if self.may_have(request, most, len(step.sampled)):
                    tokens = [*request.tokens, sampled_token_ids[row]]
                    if drafts := self._proposed(request, tokens, most):
                        found[request] = drafts
        return bool(self._worth(found, len(step.sampled)))

    def may_have(self, request: Request, most: int, sequences: int) -> bool:
        """Whether a step of so many sequences may check drafts of a request, ``most`` at most."""
        most = min(most, self.step_tokens - sequences)
        if most <= 0 or self._policy is None:
            return most > 0
        return self._policy.may_pay(sequences, request.acceptance.rate, min(most, self._most))

    def _worth(
        self, proposed: dict[Request, list[int]], sequences: int
    ) -> dict[Request, list[int]]:
        """Those of the drafts that are worth checking in a step of so many sequences."""
        if self._policy is None or not proposed:
            return proposed
        offered = [(r.acceptance.rate, len(drafts)) for r, drafts in proposed.items()]
        pairs = zip(proposed, self._policy.counts(sequences, offered), strict=True)
        return {request: proposed[request][:count] for request, count in pairs if count}

    def watch(self, step: ScheduledStep) -> None:
        """Learns from a step whose tokens are delivered how often drafts are right, those that it
        has not checked too."""
        if self._policy is None:
            return
        for i, request in enumerate(step.decoding):
            if request.state is not State.RUNNING:
                continue
            if step.drafts and step.drafts[i]:
                request.acceptance.add(step.num_accepted[i], len(step.drafts[i]))
            else:
                propose = partial(self._proposed, request, request.tokens, request.most_drafts)
                request.acceptance.watch(request.tokens, propose)

    def timed(self, step: ScheduledStep, ended: float, alone: bool) -> None:
        """A step has ended.

        Args:
            alone: whether nothing but sequences that decode was in it, and nothing ran beside it.
        """
        if self._policy is not None and alone:
            self._policy.timed(len(step.decoding), step.T, ended)
        elif self._policy is not None:
            self._policy.pause()

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
