"""Ways to run a model that are compared: on the first GPU, or on all, in a way of ``gpus``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

if TYPE_CHECKING:  # it imports torch
    from runtime.planning.execution import ExecutionPlan


@dataclass(frozen=True)
class Way:
    """One of them.

    Attributes:
        name: in tables.
        execution: of ``load_engine``; ``engine``: fields of ``EngineConfig``.
        flags: of ``pykernels.env`` while its engine is made.
        exchange: of ``passes.shard.EXPERTS``; "": as the engine has it.
    """

    name: str
    execution: ExecutionConfig
    engine: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    exchange: str = ""

    @property
    def gpus(self) -> int:
        """How many it has."""
        return count_gpus(self.execution.device)

    def planned(self, plan: ExecutionPlan) -> ExecutionPlan:
        """A plan with the exchange of this way."""
        if not self.exchange or plan.streaming is None:
            return plan
        return replace(plan, streaming=replace(plan.streaming, exchange=self.exchange))

    @contextmanager
    def flagged(self) -> Iterator[None]:
        """Within it the flags are set."""
        with env.override(**self.flags):
            yield


def count_gpus(device: str) -> int:
    """GPUs of "cuda:0,cuda:1"; of "cpu" none."""
    return len(device.split(",")) if device.startswith("cuda") else 0


def on_first(execution: ExecutionConfig, **changes: Any) -> ExecutionConfig:
    """The configuration on the first of its GPUs alone."""
    first = execution.device.split(",")[0]
    return replace(execution, device=first, gpus="auto", gpu_shares="auto", **changes)


def on_all(execution: ExecutionConfig, gpus: str, **changes: Any) -> ExecutionConfig:
    """The configuration on all of its GPUs, which share the model in a way of ``gpus``."""
    return replace(execution, gpus=gpus, **changes)


def on_some(
    execution: ExecutionConfig, gpus: str, counts: str | None, **changes: Any
) -> list[ExecutionConfig]:
    """The configuration on so many of its GPUs, the first ones, for each of ``counts``; None: all.

    Raises:
        PykernelsError: fewer than two, or more than there are.
    """
    devices = execution.device.split(",")
    found = []
    for count in numbers("--counts", counts, "2,4") if counts else [len(devices)]:
        if not 2 <= count <= len(devices):
            raise PykernelsError(
                f"--counts {counts}: {count} GPUs of {execution.device}",
                f"Give 2 to {len(devices)}; one GPU is timed in any case",
            )
        shares = execution.gpu_shares
        if shares != "auto":
            shares = ",".join(shares.split(",")[:count])
        some = replace(execution, device=",".join(devices[:count]), gpu_shares=shares)
        found.append(on_all(some, gpus, **changes))
    return found


def check_several(bench: str, execution: ExecutionConfig) -> None:
    """Raises PykernelsError for fewer than two GPUs."""
    if count_gpus(execution.device) < 2:
        raise PykernelsError(
            f"bench {bench} compares several GPUs with one, and --device is {execution.device}",
            "Give --device cuda:0,cuda:1",
        )


def named(name: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words of an option's list.

    Raises:
        PykernelsError: another word than the known ones.
    """
    words = tuple(word.strip() for word in text.split(","))
    if bad := [word for word in words if word not in known]:
        raise PykernelsError(f"{name} {text}: {bad[0]!r}", f"Use some of {','.join(known)}")
    return words


def numbers(name: str, text: str, example: str) -> tuple[int, ...]:
    """The whole numbers of an option's list, each of them once and none below 1.

    Raises:
        PykernelsError: another one.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise PykernelsError(f"{name} {text}", f"Give whole numbers, such as {example}")
    return tuple(dict.fromkeys(map(int, words)))
