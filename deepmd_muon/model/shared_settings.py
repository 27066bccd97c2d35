"""Settings and rules that several parts of a model share."""

from __future__ import annotations

from typing import Any, Literal

Precision = Literal["default", "float64", "float32", "double", "single"]

_ACTIVATIONS = (
    "tanh",
    "gelu",
    "gelu_tf",
    "relu",
    "relu6",
    "softplus",
    "sigmoid",
    "silu",
    "linear",
    "none",
)

ACTIVATION: dict[str, Any] = {
    "pattern": rf"{'|'.join(_ACTIVATIONS)}|(silut|custom_silu)(:\d+(\.\d*)?)?",
    "forms": f"one of {', '.join(map(repr, _ACTIVATIONS))}, 'silut', 'silut:T'",
    "any_case": True,
    "doc": (
        "Activation of the hidden layers. 'gelu' and 'gelu_tf' are the tanh form of GELU; "
        "'silut:T' is silu up to T "
        "(3 by default) and a tanh beyond; 'linear' and 'none' are the identity."
    ),
}
# Sizes that no model needs, and that would end as a lack of memory or as a search that does not
# end.
WIDTH: dict[str, Any] = {"minimum": 1, "maximum": 2**16}
CUTOFF: dict[str, Any] = {"above": 0.0, "maximum": 100.0}
SLOTS: dict[str, Any] = {"maximum": 2**16}
_MOST_ROOM = 100
PRECISION: dict[str, Any] = {
    "note": "half precisions are not available",
    "doc": (
        "Floating point type of the parameters and of the arithmetic; 'default' and 'double' are "
        "float64."
    ),
}

EXCLUDE_TYPES: dict[str, Any] = {
    "minimum": 0,
    "doc": "Pairs of types, by index, that do not see each other, such as [[0, 1]].",
}


def smoothing_inside(rcut_smth: float, rcut: float) -> str | None:
    """Check that the switch begins before the cut-off."""
    if rcut_smth >= rcut:
        return f"must be below rcut; found {rcut_smth:g} with rcut {rcut:g}"
    return None


def axis_inside(axis_neuron: int, neuron: tuple[int, ...]) -> str | None:
    """Check that the embedding has as many columns as the axis takes."""
    if neuron and axis_neuron > neuron[-1]:
        return (
            f"must not exceed the last width of neuron; found {axis_neuron} with neuron "
            f"{list(neuron)}"
        )
    return None


def some_layer(neuron: tuple[int, ...]) -> str | None:
    """Check that a net has a layer."""
    return None if neuron else "must name at least one layer; found an empty list"


def some_neighbors(sel: str | int | tuple[int, ...]) -> str | None:
    """Check the factor of an automatic `sel`, and that a given one selects a neighbour."""
    if isinstance(sel, str) and ":" in sel:
        factor = float(sel.split(":")[1])
        if factor < 1:
            return f"must have a factor of at least 1; found {sel!r}, which would drop neighbours"
        if factor > _MOST_ROOM:
            return f"must have a factor of at most {_MOST_ROOM}; found {sel!r}"
    if isinstance(sel, tuple) and not any(sel):
        return f"must select at least one neighbour; found {list(sel)}"
    return None


AUTO_SEL = r"auto(:\d+(\.\d*)?)?"
"""Pattern of a `sel` that the training data decide."""


def slots_for(sel: str, neighbors: int) -> int:
    """Return the slots of "auto" or "auto:factor" for the largest number of neighbours in the data.

    They are deepmd-kit's.
    """
    factor = float(sel.partition(":")[2] or 1.1)
    return max(4, (int(neighbors * factor) + 3) // 4 * 4)
