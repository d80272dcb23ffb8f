"""The rows of the op table that gated delta nets have, short convolutions, and attention with
gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .op import Attr, Op, Port

BY_TAIL = ("head_lengths", "tail_starts", "tail_lengths", "saved_slots")
"""Where a sequence's tokens behind a state that is saved begin, and how many there are in front of
it and behind it; the slot to which it is copied, or -1."""

_BY_SEQUENCE = {
    name: Port("index", ("S",))
    for name in ("query_starts", "query_lengths", "state_slots", "has_state")
}
_SAVED = {name: Port("index", ("S",), optional=True) for name in BY_TAIL}
"""Of steps that save states on their way (``passes.gpu.save_states``)."""
_LONGEST = {"longest": Attr(int, 0)}
"""Most tokens of a sequence, where all that a step runs knows it; 0: as many as a step has."""
_CONV_STATE = {"conv": Port("float32", ("slots", "before", "C"))}
_DELTA_STATE = {"delta": Port("float32", ("slots", "HV", "DK", "DV"))}
_GATES = {name: Port("float32", ("T", "HV")) for name in ("g", "beta")}
_HEADS = Port("activation", ("T", "heads*D"))
_GATED = {"x": _HEADS, "gate": Port("activation", ("T", ">gate_start + heads*D"))}


def _conv_rule(node: Mapping[str, Any]) -> str | None:
    if node["before"] != node["K"] - 1:
        return f"its state has {node['before']} inputs, and it reads {node['K'] - 1} before its own"
    if ("in_gate" in node) != ("out_gate" in node):
        return "it has one gate of two"
    return None


def _delta_rule(node: Mapping[str, Any]) -> str | None:
    if node["HV"] % node["HK"]:
        return f"{node['HV']} value heads on {node['HK']} key heads"
    return None


def _step_rule(node: Mapping[str, Any]) -> str | None:
    if node["C"] != 2 * node["HK"] * node["DK"] + node["HV"] * node["DV"]:
        return f"{node['C']} channels of its queries, keys and values"
    return _conv_rule(node) or _delta_rule(node)


DELTA_NETS: dict[str, Op] = {
    # A convolution of each channel over a token and the K - 1 before it, of which the state has
    # those of earlier steps, oldest first; its SiLU, or the sum itself. With in_gate it is of x
    # times that, and out_gate is a factor of the sum: each lies in its rows from its start on.
    "causal_conv1d": Op(
        inputs={
            "x": Port("activation", ("T", ">x_start + C")),
            "in_gate": Port("activation", ("T", ">in_gate_start + C"), optional=True),
            "out_gate": Port("activation", ("T", ">out_gate_start + C"), optional=True),
            **_CONV_STATE,
            **_BY_SEQUENCE,
            **_SAVED,
        },
        outputs={"out": Port("activation", ("T", "C")), **_CONV_STATE},
        weights={"weight": Port("", ("K", "C")), "bias": Port("", ("C",), optional=True)},
        attrs={
            **_LONGEST,
            "silu": Attr(int, 1),
            "x_start": Attr(int, 0),
            "in_gate_start": Attr(int, 0),
            "out_gate_start": Attr(int, 0),
        },
        rule=_conv_rule,
    ),
    # The gates of the delta rule: the log of the decay, rate softplus(a + dt_bias), and the
    # sigmoid of b. Rows hold a from a_start and b from b_start on.
    "delta_gates": Op(
        inputs={
            "a": Port("activation", ("T", ">a_start + HV")),
            "b": Port("activation", ("T", ">b_start + HV")),
        },
        outputs=_GATES,
        weights={"rate": Port("", ("HV",)), "dt_bias": Port("", ("HV",))},
        attrs={"a_start": Attr(int, 0), "b_start": Attr(int, 0)},
    ),
    # Each token decays its heads' states, corrects what they say of its key, and reads them. A row
    # holds queries, keys and values of all heads; queries and keys are normed here. A value head h
    # has the key head h // (HV / HK), or with ``tiled`` h % HK.
    "gated_delta_rule": Op(
        inputs={
            "qkv": Port("activation", ("T", "2*HK*DK + HV*DV")),
            **_GATES,
            **_DELTA_STATE,
            **_BY_SEQUENCE,
            **_SAVED,
        },
        outputs={"out": Port("activation", ("T", "HV*DV")), **_DELTA_STATE},
        attrs={
            "HK": Attr(int),
            "scale": Attr(float),
            "eps": Attr(float),
            "tiled": Attr(int, 0),
            **_LONGEST,
        },
        rule=_delta_rule,
    ),
    # The norm of each head, times the SiLU of its gate.
    "gated_rms_norm": Op(
        inputs=_GATED,
        outputs={"out": _HEADS},
        weights={"weight": Port("", ("D",))},
        attrs={"heads": Attr(int), "gate_start": Attr(int, 0), "eps": Attr(float)},
    ),
    # A decode step's convolution, gates and rule in one launch; what the convolution's state has of
    # a sequence stays as it is. ``delta_norm`` behind it norms and gates, and moves that on.
    "delta_step": Op(
        inputs={
            "x": Port("activation", ("T", ">x_start + C")),
            "a": Port("activation", ("T", ">a_start + HV")),
            "b": Port("activation", ("T", ">b_start + HV")),
            **_CONV_STATE,
            **_DELTA_STATE,
            **_BY_SEQUENCE,
        },
        outputs={"out": Port("activation", ("T", "HV*DV")), **_DELTA_STATE},
        weights={
            "weight": Port("", ("K", "C")),
            "rate": Port("", ("HV",)),
            "dt_bias": Port("", ("HV",)),
        },
        attrs={
            "x_start": Attr(int, 0),
            "a_start": Attr(int, 0),
            "b_start": Attr(int, 0),
            "HK": Attr(int),
            "scale": Attr(float),
            "eps": Attr(float),
            "tiled": Attr(int, 0),
        },
        rule=_step_rule,
    ),
    "delta_norm": Op(
        inputs={
            **_GATED,
            "inputs": Port("activation", ("T", ">x_start + C")),
            **_CONV_STATE,
            **_BY_SEQUENCE,
        },
        outputs={"out": _HEADS, **_CONV_STATE},
        weights={"weight": Port("", ("D",))},
        attrs={
            "heads": Attr(int),
            "gate_start": Attr(int, 0),
            "x_start": Attr(int, 0),
            "eps": Attr(float),
        },
    ),
    # Heads times the sigmoid of their gates.
    "sigmoid_mul": Op(
        inputs=_GATED,
        outputs={"out": _HEADS},
        attrs={"heads": Attr(int), "D": Attr(int), "gate_start": Attr(int, 0)},
    ),
}
