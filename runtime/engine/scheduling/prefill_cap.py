"""How many prompt tokens a step may have while other requests decode (Sarathi-Serve, OSDI 2024)."""

from __future__ import annotations

PREFILL_CAP_FLOOR = 8
"""Fewest prompt tokens of a step: one tile of the kernels. Below it a prompt would never end."""

STALL_SECONDS = 0.5
"""Target where long prompts have steps of their own, and nobody gave another one."""
_FIRST = 64
"""Prompt tokens of the first such step, of which nothing is known yet."""
_SMOOTHING = 0.2
"""Weight of the newest step in the running average of decode steps."""


class PrefillCap:
    """Keeps steps that mix decodes and prompts near a target time.

    A step of D decodes and P prompt tokens takes about ``decode + P * cost``. ``decode`` is a
    running average of steps without prompts; ``cost`` comes from the last mixed step, since it
    grows with the prompt's context. The cap moves by at most a factor of two per step.

    Args:
        target_seconds: of a mixed step; None: no cap.
        budget: most tokens of a step.
    """

    def __init__(self, target_seconds: float | None, budget: int) -> None:
        self.target, self.budget = target_seconds, budget
        self._cap = float(min(_FIRST, budget))
        self._decode: float | None = None

    def limit(self, decoding: int) -> int:
        """Most prompt tokens of the next step, in which ``decoding`` requests decode."""
        if self.target is None or not decoding:
            return self.budget
        return max(PREFILL_CAP_FLOOR, int(self._cap))

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from the step that has just ended."""
        if self.target is None or not decoding:
            return
        if not prompt_tokens:
            old = seconds if self._decode is None else self._decode
            self._decode = old + _SMOOTHING * (seconds - old)
            return
        decode = min(self._decode or 0.0, 0.9 * seconds)
        fits = prompt_tokens * max(0.0, self.target - decode) / (seconds - decode)
        # A short last chunk says little about a longer one, so it may only lower the cap.
        if prompt_tokens < self._cap / 2:
            fits = min(fits, self._cap)
        self._cap = min(max(fits, self._cap / 2, PREFILL_CAP_FLOOR), 2 * self._cap, self.budget)
