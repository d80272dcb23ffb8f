"""What decode steps of a loaded model should take, and whether they do."""

from __future__ import annotations

from dataclasses import dataclass

from pykernels import target
from pykernels.errors import PykernelsError
from runtime.devices.sim.cost import Load
from runtime.devices.sim.drafts import DraftForecast, draft_forecast
from runtime.devices.sim.machine import Machine
from runtime.devices.sim.step import simulate
from runtime.engine.pace import DecodePace, Speed
from runtime.planning.compile import compile
from runtime.planning.execution import ExecutionPlan, Phase
from runtime.planning.lowerable import Lowerable
from runtime.planning.placement import CPU
from runtime.planning.work import weight_bytes
from runtime.profiling.this_machine import this_machine
from runtime.workers.pool import WorkerPool


@dataclass(frozen=True)
class Forecast:
    """Predicts decode steps of a model that runs by a finished plan."""

    model: Lowerable
    plan: ExecutionPlan
    machine: Machine

    def tok_s(self, sequences: int = 1, context: int = 512) -> float:
        """Tokens a second of so many sequences, without drafts."""
        compiled = compile(self.model, self.plan, Phase.DECODE, sequences)
        step = simulate(compiled, self.machine, Load(sequences, context, sequences))
        return sequences / step.seconds

    def drafts(self, most: int) -> DraftForecast:
        """What checking up to so many drafts of one sequence takes, and whether it pays."""
        context = min(512, self.plan.max_model_len)
        return draft_forecast(self.plan, self.model, self.machine, Load(1, context), most)

    def speed(self, pace: DecodePace) -> Speed:
        """The prediction beside what was measured."""
        predicted = self.tok_s(pace.sequences, pace.context)
        return Speed(pace.sequences, pace.context, predicted, pace.sequences / pace.seconds)

    @property
    def line(self) -> str:
        """The speed of one sequence, in a line."""
        context = min(512, self.plan.max_model_len)
        return (
            f"decode is predicted at {self.tok_s(1, context):.1f} tok/s at a context of {context},"
            f" by {self.machine.cpu.read_gbps:.0f} GB/s of read roof and rates of this class of CPU"
        )


def forecast_of(model: Lowerable, plan: ExecutionPlan, pool: WorkerPool) -> Forecast | None:
    """The forecast of what runs on this machine; None: there is none, since its weights fit into
    the CPU's cache, it runs in Triton's interpreter or on references, has passes of a user's, is
    dealt over NUMA nodes or several GPUs, or no memory is left to measure the read roof.

    Args:
        pool: the workers, which compute nothing meanwhile.
    """
    placement = plan.placement
    devices = {placement.device, placement.experts, *placement.by_layer.values()} - {CPU}
    on_one = len(plan.nodes) == 1 and not plan.tensor and len(devices) <= 1
    real = all(name.startswith("cuda:") and name[5:].isdecimal() for name in devices)
    if not (on_one and real) or plan.passes:
        return None
    program = compile(model, plan, Phase.DECODE).program
    if CPU in (placement.device, placement.experts) and (
        weight_bytes(program, device=CPU) <= target.detect().l3
    ):
        return None
    try:
        return Forecast(model, plan, this_machine(pool.threads, pool))
    except PykernelsError:  # no memory for the buffer that is read
        return None
