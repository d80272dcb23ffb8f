"""What a user may ask for of a plan, beside the sizes of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..experts.cache import CachePolicy
from .lowerable import Pass
from .placement import Placement


@dataclass(frozen=True)
class PlanOptions:
    """What a user may ask for.

    Attributes:
        experts: where routed experts are beside a GPU: "cpu", "gpu", or "auto": there if all fit.
            On the ref device: "cpu", or with all else.
        deferred: experts of a token of an output that join one layer later; None: as many as keep
            the CPU busy beside a GPU, found by measuring.
        dual_batch: whether decode steps of two sequences or more have two lanes; "auto": if the
            experts are on the CPU beside a GPU.
        prefill: where the experts on the CPU are computed in steps with chunks of prompts: "cpu";
            "stream": on the GPU, to which they cross; "split": some there, the others on the CPU;
            "auto": as is fastest for so many tokens.
        placement: of the model's nodes, where it is chosen already; None: it follows from
            ``experts``.
        policy: by which experts in slots change.
        kernel: a backend of ``pykernels.registry`` for what is on the CPU, or "auto".
        passes: of the user, for decode steps.
    """

    experts: str = "auto"
    deferred: int | None = 0
    dual_batch: bool | str = False
    prefill: str = "cpu"
    placement: Placement | None = None
    policy: CachePolicy | None = None
    kernel: str = "auto"
    passes: Sequence[Pass] = ()
