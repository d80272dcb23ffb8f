"""A step on a machine: which node runs when on which lane, while main memory is shared.

Every device has lanes that do one thing at a time: the CPU its workers, a GPU its streams. A
node begins when its lane is free and what it reads is there. What runs at once shares main
memory, and what comes to a GPU its link: where all of it together wants more than there is, all go
slower by the same factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...planning.compile import Compiled
from ...planning.placement import CPU
from ...program import Node
from ...program.analysis import dependencies, on_streams
from .cost import CostModel, Load
from .machine import Machine
from .terms import HOST, Cost


@dataclass(frozen=True, slots=True)
class Ran:
    """A node that ran.

    Attributes:
        lane: device and stream; ``begin``, ``end``: seconds from the step's begin.
        alone: seconds that it would have taken alone.
    """

    node: Node
    lane: tuple[str, str]
    begin: float
    end: float
    alone: float
    cost: Cost


@dataclass(frozen=True)
class SimulatedStep:
    """What a step did.

    Attributes:
        seconds: of all, Python's part among them.
        bounds: by what bounds it, seconds of the longest chain of nodes.
    """

    seconds: float
    ran: tuple[Ran, ...]
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """What most of the step waits for."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    def stretched(self, factor: float) -> SimulatedStep:
        """The step of a model that has so many times the layers, all like these."""
        outside = sum(ran.end - ran.begin for ran in self.ran if ran.node.layer is None)
        outside += self.bounds.get(HOST, 0.0)
        within = max(0.0, self.seconds - outside)
        longer = 1 + within * (factor - 1) / self.seconds
        bounds = {name: s * (1 if name == HOST else longer) for name, s in self.bounds.items()}
        return replace(self, seconds=self.seconds * longer, bounds=bounds)

    def busy(self, device: str) -> float:
        """The part of the time between its first and its last node in which any of a device's
        lanes does something."""
        end = max((ran.end for ran in self.ran), default=0.0)
        own = sorted((ran.begin, ran.end) for ran in self.ran if ran.lane[0] == device)
        taken, last = 0.0, 0.0
        for begin, finish in own:
            taken += max(0.0, finish - max(begin, last))
            last = max(last, finish)
        return taken / end if end else 0.0


@dataclass(slots=True)
class _Task:
    node: Node
    lane: tuple[str, str]
    cost: Cost
    waits: list[int]
    left: float = 0.0
    launched: float = 0.0  # not before, where no graph launches it
    begin: float = -1.0
    end: float = -1.0
    last: int = -1  # the task for which it waited longest


def simulate(
    compiled: Compiled, machine: Machine, load: Load, beside_gbps: float = 0.0
) -> SimulatedStep:
    """Runs a step of a program on a machine.

    Args:
        compiled: of a plan whose devices the machine has.
        beside_gbps: 1e9 bytes a second of main memory that something else takes meanwhile.
    """
    tasks = _tasks(compiled, machine, load)
    total = (machine.cpu.contended_gbps or machine.cpu.read_gbps) - beside_gbps
    link = machine.gpu.link_gbps if machine.gpu else 0.0
    roofs = dict.fromkeys((*machine.gpus, *compiled.parts), link * 1e9) | {CPU: total * 1e9}
    _run(tasks, roofs)
    end = max((task.end for task in tasks), default=0.0)
    host = (machine.engine.step_us if load.decodes else machine.engine.prompt_us) * 1e-6
    ran = tuple(Ran(t.node, t.lane, t.begin, t.end, t.cost.seconds, t.cost) for t in tasks)
    return SimulatedStep(end + host, ran, _chain(tasks) | {HOST: host})


def _tasks(compiled: Compiled, machine: Machine, load: Load) -> list[_Task]:
    tasks: list[_Task] = []
    ends: dict[int, list[int]] = defaultdict(list)  # by channel: submit, then wait
    work = compiled.work(load.tokens, load.context)
    host_us = _uncaptured(compiled, machine)
    for device, part in compiled.parts.items():
        launched = 0
        model, first = CostModel(machine, part, compiled.program, load), len(tasks)
        order = dependencies(part) if device == CPU else on_streams(part)
        for node, before in zip(part.nodes, order.direct, strict=True):
            stream = "workers" if device == CPU else (node.stream or "main")
            cost = model.of(node, work[node.name])
            waits = [first + i for i in before]
            launched += model.launches(node) if device != CPU else 0
            at = launched * host_us * 1e-6
            tasks.append(_Task(node, (device, stream), cost, waits, cost.seconds, at))
            if node.op in ("submit", "wait"):
                ends[node.attr("channel")].append(len(tasks) - 1)
    for numbers in ends.values():
        pair = {tasks[i].node.op: i for i in numbers}
        tasks[pair["wait"]].waits.append(pair["submit"])
    return tasks


def _uncaptured(compiled: Compiled, machine: Machine) -> float:
    """Microseconds of the host for each launch on each GPU; 0: a graph launches all. Hosts of
    several GPUs are threads of one interpreter, of which one runs at a time."""
    gpus = [device for device in compiled.parts if device != CPU]
    if machine.gpu is None or not any(n.op == "attention_expanded" for n in compiled.program.nodes):
        return 0.0
    return machine.gpu.uncaptured_us * len(gpus)


def _run(tasks: list[_Task], roofs: Mapping[str, float]) -> None:
    """Gives every task its begin and end.

    Args:
        roofs: bytes a second of main memory, as "cpu", and of the link of each GPU.
    """
    queues: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        queues[task.lane].append(i)
    running: dict[tuple[str, str], int] = {}
    now = 0.0
    while running or any(queues.values()):
        _begin(tasks, queues, running, now)
        heads = (tasks[queue[0]].launched for queue in queues.values() if queue)
        launch = min((at for at in heads if at > now), default=float("inf"))
        if not running and launch == float("inf"):  # the rest took no time
            break
        paces = _paces(tasks, running, roofs)
        took = min((tasks[i].left * paces[lane] for lane, i in running.items()), default=launch)
        took = min(took, launch - now)
        now += took
        for lane, i in list(running.items()):
            tasks[i].left -= took / paces[lane]
            if tasks[i].left <= 1e-12:
                tasks[i].end = now
                del running[lane]


def _paces(
    tasks: list[_Task], running: Mapping[tuple[str, str], int], roofs: Mapping[str, float]
) -> dict[tuple[str, str], float]:
    """By how much what runs is slower than alone."""
    wanted: dict[str, float] = defaultdict(float)
    shares: dict[tuple[str, str], list[str]] = {}
    for lane, i in running.items():
        cost, shares[lane] = tasks[i].cost, []
        for name, nbytes in ((CPU, cost.main_bytes), (lane[0], cost.link_bytes)):
            if nbytes and cost.seconds:
                wanted[name] += nbytes / cost.seconds
                shares[lane].append(name)
    slower = {name: max(1.0, rate / roofs[name]) for name, rate in wanted.items()}
    return {
        lane: max((slower[name] for name in names), default=1.0) for lane, names in shares.items()
    }


def _begin(
    tasks: list[_Task],
    queues: Mapping[tuple[str, str], list[int]],
    running: dict[tuple[str, str], int],
    now: float,
) -> None:
    """Begins on each free lane the first task in order that is ready; what takes no time ends
    at once, and may make others ready."""
    again = True
    while again:
        again = False
        for lane, queue in queues.items():
            if lane in running:
                continue
            for place, i in enumerate(queue):
                task = tasks[i]
                ready = all(0 <= tasks[w].end <= now for w in task.waits)
                if ready and task.launched <= now:
                    del queue[place]
                    task.begin = now
                    task.last = max(task.waits, key=lambda w: tasks[w].end, default=-1)
                    if task.left <= 0:
                        task.end = now
                    else:
                        running[lane] = i
                    again = True
                    break
                if lane[0] != CPU:  # a stream runs its nodes in order
                    break


def _chain(tasks: list[_Task]) -> dict[str, float]:
    """The chain of tasks that ends last, as seconds of each bound."""
    found: dict[str, float] = defaultdict(float)
    if not tasks:
        return found
    before_on_lane: dict[int, int] = {}
    last: dict[tuple[str, str], int] = {}
    for i in sorted(range(len(tasks)), key=lambda i: (tasks[i].begin, tasks[i].end)):
        before_on_lane[i] = last.get(tasks[i].lane, -1)
        last[tasks[i].lane] = i
    at = max(range(len(tasks)), key=lambda i: tasks[i].end)
    while at >= 0:
        task = tasks[at]
        found[task.cost.bound] += task.end - task.begin
        earlier = [i for i in (task.last, before_on_lane[at]) if i >= 0 and i != at]
        at = max(earlier, key=lambda i: tasks[i].end, default=-1)
    return dict(found)
