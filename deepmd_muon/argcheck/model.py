"""Section `model`: what maps positions to energy."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from deepmd_muon.argcheck.schema import Foreign, Rule, Section, Variants, keys_of, section
from deepmd_muon.setting import setting

Precision = Literal["default", "float64", "float32", "double", "single"]

_ACTIVATIONS = ("tanh", "gelu", "gelu_tf", "relu", "relu6", "softplus", "sigmoid", "silu", "linear", "none", "None")


_ACTIVATION: dict[str, Any] = {
    "pattern": rf"{'|'.join(_ACTIVATIONS)}|(silut|custom_silu)(:\d+(\.\d*)?)?",
    "forms": f"one of {', '.join(map(repr, _ACTIVATIONS))}, 'silut', 'silut:T'",
    "doc": (
        "Activation of the hidden layers. 'gelu' and 'gelu_tf' are the tanh form of GELU; 'silut:T' is silu up to T "
        "(3 when left out) and a tanh beyond; 'linear' and 'none' are none."
    ),
}
_PRECISION: dict[str, Any] = {
    "note": "half precisions are not available",
    "doc": "Floating point type of the parameters and of the arithmetic; 'default' and 'double' are float64.",
}


def _smoothing_inside(rcut_smth: float, rcut: float) -> str | None:
    if rcut_smth >= rcut:
        return f"must be below rcut; found {rcut_smth:g} with rcut {rcut:g}"
    return None


def _axis_inside(axis_neuron: int, neuron: tuple[int, ...]) -> str | None:
    if neuron and axis_neuron > neuron[-1]:
        return f"must not exceed the last width of neuron; found {axis_neuron} with neuron {list(neuron)}"
    return None


def _auto_factor(sel: str | tuple[int, ...]) -> str | None:
    if isinstance(sel, str) and ":" in sel and float(sel.split(":")[1]) < 1:
        return f"must have a factor of at least 1; found {sel!r}, which would drop neighbours"
    if isinstance(sel, tuple) and not any(sel):
        return f"must select at least one neighbour; found {list(sel)}"
    return None


def _widths(neuron: tuple[int, ...]) -> str | None:
    return None if neuron else "must name at least one layer; found an empty list"


@dataclasses.dataclass(frozen=True)
class SeE2ASettings(Section):
    """Smooth two-body embedding descriptor built from full relative coordinates."""

    type: ClassVar[str] = "se_e2_a"

    sel: str | tuple[int, ...] = setting(
        "auto",
        minimum=0,
        pattern=r"auto(:\d+(\.\d*)?)?",
        forms='"auto", "auto:factor" or one whole number for each type',
        doc=(
            "Largest number of neighbours of each type that an atom may have inside rcut. 'auto:factor' takes the "
            "largest number found in the training data, times factor, rounded up to a multiple of 4; 'auto' is "
            "'auto:1.1'."
        ),
    )
    rcut: float = setting(6.0, above=0.0, doc="Cut-off radius [Å].")
    rcut_smth: float = setting(
        0.5, minimum=0.0, doc="Radius [Å] from which the weight of a neighbour falls smoothly to 0 at rcut."
    )
    neuron: tuple[int, ...] = setting(
        (10, 20, 40),
        minimum=1,
        doc=(
            "Widths of the embedding net. A layer as wide as the one before it, or twice as wide, adds its input "
            "to its output."
        ),
    )
    axis_neuron: int = setting(
        4,
        minimum=1,
        alias=("n_axis_neuron",),
        doc="Number of columns of the embedding matrix that the descriptor multiplies the whole matrix with.",
    )
    activation_function: str = setting("tanh", **_ACTIVATION)
    resnet_dt: bool = setting(False, doc="Scale what a layer adds to its input by a trainable vector.")
    type_one_side: bool = setting(
        False, doc="One embedding net for each type of neighbour instead of one for each pair of types."
    )
    precision: Precision = setting("default", **_PRECISION)
    trainable: bool = setting(True, doc="Train the parameters of the descriptor.")
    seed: int | None = setting(None, minimum=0, doc="Seed of the initial parameters; left out, they are random.")
    exclude_types: tuple[tuple[int, int], ...] = setting(
        (), minimum=0, doc="Pairs of types, by index, that do not see each other, such as [[0, 1]]."
    )
    env_protection: float = setting(0.0, minimum=0.0, doc="Length [Å] added to every distance before dividing by it.")
    set_davg_zero: bool = setting(
        False, doc="Keep the mean of the environment at 0 instead of taking it from the data; meant for atom_ener."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("rcut_smth", "rcut"), _smoothing_inside),
        Rule(("axis_neuron", "neuron"), _axis_inside),
        Rule(("neuron",), _widths),
        Rule(("sel",), _auto_factor),
    )


def _one_flag_a_layer(trainable: bool | tuple[bool, ...], neuron: tuple[int, ...]) -> str | None:
    if isinstance(trainable, tuple) and len(trainable) != len(neuron) + 1:
        return f"must have one value for each of the {len(neuron) + 1} layers; found {len(trainable)}"
    return None


_NO_PARAMETERS = "frame and atomic parameters are not available"


@dataclasses.dataclass(frozen=True)
class EnerSettings(Section):
    """Fitting net of the energy: one net for each type, its outputs summed over the atoms."""

    type: ClassVar[str] = "ener"

    neuron: tuple[int, ...] = setting(
        (120, 120, 120),
        minimum=1,
        alias=("n_neuron",),
        doc="Widths of the hidden layers. A layer as wide as the one before it adds its input to its output.",
    )
    resnet_dt: bool = setting(True, doc="Scale what a layer adds to its input by a trainable vector.")
    activation_function: str = setting("tanh", **_ACTIVATION)
    precision: Precision = setting("default", **_PRECISION)
    trainable: bool | tuple[bool, ...] = setting(
        True, doc="Train the parameters; a list, one value a layer, trains the net only when all are true."
    )
    seed: int | None = setting(None, minimum=0, doc="Seed of the initial parameters; left out, they are random.")
    atom_ener: tuple[float | None, ...] = setting(
        (), doc="Energy [eV] of a free atom of each type; null leaves a type to the statistics of the data."
    )
    rcond: float | None = setting(
        None, minimum=0.0, doc="Relative cut-off of singular values in the least squares fit of the energy biases."
    )
    numb_fparam: int = setting(0, choices=(0,), note=_NO_PARAMETERS, doc="Number of frame parameters.")
    numb_aparam: int = setting(0, choices=(0,), note=_NO_PARAMETERS, doc="Number of atomic parameters.")

    rules: ClassVar[tuple[Rule, ...]] = (Rule(("trainable", "neuron"), _one_flag_a_layer),)
    foreign: ClassVar[dict[str, Foreign]] = {
        "default_fparam": Foreign("default frame parameters"),
        "dim_case_embd": Foreign("an embedding of multi-task branches", (0,)),
        "layer_name": Foreign("layers shared by name"),
        "use_aparam_as_mask": Foreign("masked atoms", (False,)),
    }


def _a_sel_for_each_type(sel: str | tuple[int, ...], type_map: tuple[str, ...]) -> str | None:
    if isinstance(sel, tuple) and len(sel) != len(type_map):
        return f"must have one number for each of the {len(type_map)} types in type_map; found {len(sel)}"
    return None


def _known_types(exclude_types: tuple[tuple[int, int], ...] | None, type_map: tuple[str, ...]) -> str | None:
    unknown = sorted({index for pair in exclude_types or () for index in pair if index >= len(type_map)})
    if unknown:
        return f"names type {unknown[0]}, but type_map has types 0 to {len(type_map) - 1}"
    return None


def _an_energy_for_each_type(atom_ener: tuple[float | None, ...], type_map: tuple[str, ...]) -> str | None:
    if atom_ener and len(atom_ener) != len(type_map):
        return f"must have one energy for each of the {len(type_map)} types in type_map; found {len(atom_ener)}"
    return None


def _distinct_names(type_map: tuple[str, ...]) -> str | None:
    if not type_map:
        return "must name at least one type; found an empty list"
    double = [name for index, name in enumerate(type_map) if name in type_map[:index]]
    return f"names {double[0]!r} twice" if double else None


DESCRIPTORS: dict[str, type[Section]] = {"se_e2_a": SeE2ASettings}
FITTING_NETS: dict[str, type[Section]] = {"ener": EnerSettings}


def register_model_settings(part: Literal["descriptor", "fitting_net"], name: str, settings: type[Section]) -> None:
    """Accept a third party's kind of descriptor or fitting net in input files.

    Parameters
    ----------
    part
        Which sub-section of `model` it is for.
    name
        The value of its key `type`, under which the model registry knows it, too.
    settings
        Frozen dataclass derived from `Section`, its fields declared with `setting`, and `type` a ClassVar of this name.

    Raises
    ------
    ValueError
        When the name is taken.
    """
    table = DESCRIPTORS if part == "descriptor" else FITTING_NETS
    if table.get(name, settings) is not settings:
        raise ValueError(f"model/{part} of type {name!r} is taken by {table[name].__qualname__}; choose another name")
    table[name] = settings
    keys_of.cache_clear()


@dataclasses.dataclass(frozen=True)
class ModelSettings(Section):
    """What maps positions to energy: a descriptor of each atom's neighbourhood and a fitting net."""

    type_map: tuple[str, ...] = setting(doc="Names of the types of atoms, such as ['O', 'H'].")
    descriptor: SeE2ASettings = section(
        doc="Descriptor of the neighbourhood of an atom.",
        variants=Variants(DESCRIPTORS, alias={"se_a": "se_e2_a"}),
    )
    fitting_net: EnerSettings = section(
        EnerSettings(),
        doc="Net that maps a descriptor to the energy of an atom.",
        variants=Variants(FITTING_NETS, default="ener"),
    )
    type: Literal["standard"] = setting("standard", doc="Kind of model: one descriptor and one fitting net.")
    data_stat_nbatch: int = setting(
        10, minimum=1, doc="Batches of each system from which means and deviations of the descriptor are taken."
    )
    data_stat_protect: float = setting(0.01, above=0.0, doc="Smallest deviation that the environment is divided by.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("type_map",), _distinct_names),
        Rule(("descriptor/sel", "type_map"), _a_sel_for_each_type),
        Rule(("descriptor/exclude_types", "type_map"), _known_types),
        Rule(("fitting_net/atom_ener", "type_map"), _an_energy_for_each_type),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        "data_bias_nsample": Foreign("it serves the change of the bias of an existing model", (10,), inert=True),
        "use_srtab": Foreign("a tabulated short-range potential"),
        "smin_alpha": Foreign("a tabulated short-range potential"),
        "sw_rmin": Foreign("a tabulated short-range potential"),
        "sw_rmax": Foreign("a tabulated short-range potential"),
        "srtab_add_bias": Foreign("it belongs to use_srtab", (True,), inert=True),
        "pair_exclude_types": Foreign("excluded pairs beside the descriptor's exclude_types", ([],)),
        "atom_exclude_types": Foreign("types without energy", ([],)),
        "preset_out_bias": Foreign("a preset bias (see fitting_net/atom_ener)"),
        "type_embedding": Foreign("a type embedding outside the descriptor"),
        "modifier": Foreign("a modifier of the model's output"),
        "compress": Foreign("model compression"),
        "spin": Foreign("atomic spins"),
        "finetune_head": Foreign("multi-task fine-tuning"),
        "model_branch_alias": Foreign("multi-task training", ([],)),
        "model_dict": Foreign("multi-task training"),
        "shared_dict": Foreign("multi-task training"),
        "info": Foreign("metadata are not carried", ({},), inert=True),
        "bridging_method": Foreign("an analytical short-range potential", ("None", "none")),
        "bridging_r_inner": Foreign("it belongs to bridging_method", (0.5,), inert=True),
        "bridging_r_outer": Foreign("it belongs to bridging_method", (0.8,), inert=True),
    }
