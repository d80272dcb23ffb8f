"""What a prediction is made for: the requests, and the options that the model runs with."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.devices.sim.machine import Machine
from runtime.devices.sim.routing import Routing
from runtime.planning.config import ExecutionConfig

from .subject import Subject


@dataclass(frozen=True)
class Wanted:
    """The requests.

    Attributes:
        context: tokens of a sequence, of which a decode step reads keys and values.
        prompt: tokens that are read at once; ``batch``: sequences that decode at once.
        answer: tokens of an answer, by which gains of a prompt and of decoding are weighed.
        routing: by which tokens choose experts.
        step_tokens: most of a step, as ``--max-num-batched-tokens`` of a server; None: as the
            engine chooses.
        pages: of 64 tokens, of the cache; None: as many as a server has.
    """

    context: int = 512
    prompt: int = 4096
    batch: int = 1
    answer: int = 256
    routing: Routing = Routing()
    step_tokens: int | None = None
    pages: int | None = None

    @property
    def positions(self) -> int:
        """The longest sequence."""
        return max(self.context, self.prompt + self.answer)


@dataclass(frozen=True)
class Case:
    """A model on a machine, with options; ``slots``: of each layer on a GPU, for experts that
    change from step to step."""

    subject: Subject
    machine: Machine
    execution: ExecutionConfig
    wanted: Wanted
    slots: int = 0
