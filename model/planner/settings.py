"""What a prediction is made for: the requests, and the options that the model runs with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.devices.sim.machine import Machine
from runtime.devices.sim.routing import Routing
from runtime.engine.scheduling.config import CONTEXT, EngineConfig
from runtime.planning.config import ExecutionConfig

from .asked import Asked
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
        engine: whose cache there is to be; None: one for just these sequences.
        pages: of 64 tokens, of the cache; None: as ``engine`` has.
    """

    context: int = 512
    prompt: int = 4096
    batch: int = 1
    answer: int = 256
    routing: Routing = Routing()
    step_tokens: int | None = None
    engine: EngineConfig | None = None
    pages: int | None = None

    def within(self, positions: int) -> Wanted:
        """The same requests, shortened so that a model of so many positions takes them."""
        answer = min(self.answer, max(1, positions // 2))
        prompt = min(self.prompt, max(1, positions - answer))
        return replace(self, context=min(self.context, positions), prompt=prompt, answer=answer)

    @property
    def positions(self) -> int:
        """The longest sequence."""
        return max(self.context, self.prompt + self.answer)


def wanted_of(asked: Asked, positions: int, law: Routing) -> Wanted:
    """The requests that were asked for, of a server that is started for them.

    Args:
        positions: of the model; ``law``: what ``asked.routing`` is.
    """
    usual = Wanted(batch=asked.batch, routing=law).within(positions)
    given = {name: getattr(asked, name) for name in ("context", "prompt", "answer")}
    wanted = replace(usual, **{name: n for name, n in given.items() if n is not None})
    longest = wanted.positions if wanted.positions > CONTEXT else None
    engine = EngineConfig(max_model_len=longest)
    engine = replace(engine, max_num_seqs=max(engine.max_num_seqs, asked.batch))
    return replace(wanted, engine=engine)


@dataclass(frozen=True)
class Case:
    """A model on a machine, with options; ``slots``: of each layer on a GPU, for experts that
    change from step to step, as ``execution`` asks for them."""

    subject: Subject
    machine: Machine
    execution: ExecutionConfig
    wanted: Wanted
    slots: int = 0
