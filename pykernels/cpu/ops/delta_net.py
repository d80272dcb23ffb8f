"""The ops of gated delta nets on the calling thread."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import PykernelsError
from ...shapes import StateBatch
from ...target import detect
from ..delta_net.args import DELTA_RULE, DeltaRulePlan
from ..delta_net.conv import CONV, make_causal_conv1d
from ..delta_net.kernel import make_delta_rule
from ..vectors import width
from .checks import check_tensor, floats, number
from .serial import Record, counted, run_tasks


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    tiled: bool = False,
    plan: DeltaRulePlan | None = None,
) -> torch.Tensor:
    """Each token decays its heads' states, corrects what they say of its key, and reads them.

    Args:
        q, k: floats [T, HK, DK], not normed; DK and DV are multiples of 16.
        v: floats [T, HV, DV]; head ``h`` has the queries and keys of head ``h // (HV / HK)``, or
            ``tiled`` those of head ``h % HK``.
        g: floats [T, HV], the log of the decay, at most 0.
        beta: floats [T, HV], how much of a correction is written.
        state: float32 [slots, HV, DK, DV], contiguous, read and written.
        batch: where each sequence's tokens and state lie.
        scale: of the queries; ``DK ** -0.5`` if None.
        eps: added to the sum of squares of queries and keys.
        plan: how heads are divided into tasks, here one after the other.

    Returns:
        float32 [T, HV, DV]; rows of no sequence (padding) are zeros.

    Raises:
        PykernelsError: inputs that do not fit, or rows or a slot that are not there.

    Source: "Gated Delta Networks" (arXiv 2412.06464).
    """
    k = floats("k", k, "T", "HK", "DK")
    T, HK, DK = k.shape
    q, v = floats("q", q, T, HK, DK), floats("v", v, T, "HV", "DV")
    HV, DV = v.shape[1:]
    if not HK or HV % HK:
        raise PykernelsError(
            f"{HV} value heads on {HK} key heads", "Give a key head as many as the next"
        )
    g, beta = floats("g", g, T, HV), floats("beta", beta, T, HV)
    fields = _sequences(batch, T, state, HV, DK, DV)
    kernel = make_delta_rule(DK, DV, width(detect()))
    columns = DV if plan is None else plan.columns
    if columns < 1 or columns % kernel.strip or DV % columns:
        raise PykernelsError(
            f"tasks of {columns} columns of {DV}",
            f"Give a divisor that is so many times {kernel.strip}",
        )
    out = torch.zeros(T, HV, DV, dtype=torch.float32, device="cpu")
    record = Record(
        DELTA_RULE,
        **fields,
        q=q,
        q_stride=4 * HK * DK,
        k=k,
        k_stride=4 * HK * DK,
        v=v,
        v_stride=4 * HV * DV,
        g=g,
        g_stride=4 * HV,
        beta=beta,
        beta_stride=4 * HV,
        HK=HK,
        HV=HV,
        group=1 if tiled else HV // HK,
        scale=DK**-0.5 if scale is None else number("scale", scale),
        eps=number("eps", eps),
        slot_bytes=4 * HV * DK * DV,
        out=out,
        out_stride=4 * HV * DV,
        columns=columns,
    )
    run_tasks((kernel.setup, kernel.run), record.address)
    return out


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    *,
    silu: bool = True,
    bias: torch.Tensor | None = None,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """A convolution of each channel with itself over a token and the ``K - 1`` before it:
    ``out[t, c] = silu(bias[c] + sum_j weight[c, j] x[t - K + 1 + j, c])``.

    Args:
        x: floats [T, C], C a multiple of 16.
        weight: floats [C, K], K at least 2.
        state: float32 [slots, K - 1, C], contiguous, the last inputs of each sequence, oldest
            first; read and written.
        batch: where each sequence's tokens and state lie.
        silu: False: the sum itself.
        bias: floats [C].
        gates: floats [T, C] each: factors of the inputs, which the state has with them, and of the
            result.

    Returns:
        float32 [T, C]; rows of no sequence (padding) are zeros.

    Raises:
        PykernelsError: inputs that do not fit, or rows or a slot that are not there.
    """
    weight = floats("weight", weight, "C", "K")
    C, K = weight.shape
    x = floats("x", x, "T", C)
    if K < 2 or C % 16:
        raise PykernelsError(
            f"a convolution of {C} channels over {K} tokens",
            "Give channels in multiples of 16, and at least 2 tokens",
        )
    fields = _sequences(batch, len(x), state, K - 1, C)
    for name, gate in zip(("in_gate", "out_gate"), gates or (), strict=False):
        fields |= {name: floats(name, gate, len(x), C), f"{name}_stride": 4 * C}
    if bias is not None:
        fields["bias"] = floats("bias", bias, C)
    out = torch.zeros(len(x), C, dtype=torch.float32, device="cpu")
    record = Record(
        CONV,
        **fields,
        x=x,
        x_stride=4 * C,
        weight=weight.T.contiguous(),
        C=C,
        slot_bytes=4 * (K - 1) * C,
        out=out,
        out_stride=4 * C,
    )
    tasks = make_causal_conv1d(K, bool(silu), gates is not None, width(detect()))
    run_tasks(tasks, record.address)
    return out


def _sequences(batch: StateBatch, T: int, state: torch.Tensor, *sizes: int) -> dict[str, Any]:
    """The fields of a record that say where tokens and states lie, all known to be there.

    Raises:
        PykernelsError: a state of another shape, or rows or a slot that are not there.
    """
    check_tensor("state", state, ("slots", *sizes), (torch.float32,))
    if not state.is_contiguous():
        raise PykernelsError("the state has gaps", "It is written in place: give it contiguous")
    starts, lengths, slots, past = (
        x.long() for x in (batch.starts, batch.lengths, batch.slots, batch.past)
    )
    used = (slots >= 0) & (lengths > 0)
    ends = (starts + lengths)[used]
    if len(ends) and (starts[used].min() < 0 or ends.max() > T):
        raise PykernelsError(
            f"rows from {int(starts[used].min())} to {int(ends.max())} of {T}",
            "Starts and lengths must be rows of the tokens",
        )
    own = slots[used]
    if len(own) and own.max() >= len(state):
        raise PykernelsError(
            f"slot {int(own.max())} of {len(state)}", "Give slots of the state, or -1 for none"
        )
    if len(own.unique()) < len(own):
        raise PykernelsError("two sequences have one slot", "Give each its own")
    return {
        "count_at": counted(batch.S),
        "starts": starts,
        "lengths": lengths,
        "slots": slots,
        "past": past,
        "state": state,
    }
