"""The learning rate over a run whose length is a wall-clock budget."""

from dataclasses import dataclass


@dataclass
class Schedule:
    """Warm-up, a constant phase, a linear decay to zero over the last `decay` of the run.

    The run ends after `steps`, or when `seconds` are over, whichever is first: the decay follows
    the larger of the two fractions, so a slow machine still reaches zero in time.
    """

    steps: int
    seconds: float
    warmup: int = 200
    decay: float = 0.6

    def progress(self, step: int, elapsed: float) -> float:
        """The fraction of the run that is over, 0 to 1."""
        return min(1.0, max(step / self.steps, elapsed / self.seconds))

    def scale(self, step: int, elapsed: float) -> float:
        """The learning rate as a fraction of its peak."""
        left = 1.0 - self.progress(step, elapsed)
        warm = (step + 1) / min(self.warmup, max(1, self.steps // 5))
        return max(0.0, min(1.0, warm, left / self.decay))

    def decaying(self, step: int, elapsed: float) -> bool:
        """Whether the decay has begun."""
        return 1.0 - self.progress(step, elapsed) < self.decay

    def decay_from_now(self, step: int) -> None:
        """End the constant phase at `step`: the model has begun to learn its corpus by heart."""
        self.steps = min(self.steps, max(step + 1, round(step / (1.0 - self.decay))))
