"""Settings of the fitting net `ener`; torch-free."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from deepmd_muon.model.shared_settings import ACTIVATION, PRECISION, WIDTH, Precision
from deepmd_muon.section import Foreign, Rule, Section
from deepmd_muon.setting import above_zero, setting


def _one_flag_a_layer(trainable: bool | tuple[bool, ...], neuron: tuple[int, ...]) -> str | None:
    if isinstance(trainable, tuple) and len(trainable) != len(neuron) + 1:
        return (
            f"must have one value for each of the {len(neuron) + 1} layers; found {len(trainable)}"
        )
    return None


def _a_default_for_each(default_fparam: tuple[float, ...] | None, numb_fparam: int) -> str | None:
    if default_fparam is not None and len(default_fparam) != numb_fparam:
        return (
            f"must have one value for each of the {numb_fparam} frame parameters; found "
            f"{len(default_fparam)}"
        )
    return None


@dataclasses.dataclass(frozen=True)
class EnerSettings(Section):
    """Fitting net of the energy, its outputs summed over the atoms.

    One net for each type; one for all types after a descriptor that mixes types in its list.
    """

    type: ClassVar[str] = "ener"

    neuron: tuple[int, ...] = setting(
        (120, 120, 120),
        **WIDTH,
        alias=("n_neuron",),
        doc=(
            "Widths of the hidden layers. A layer as wide as the one before it adds its input to "
            "its output."
        ),
    )
    resnet_dt: bool = setting(
        True, doc="Multiply the term that a layer adds to its input by a trainable vector."
    )
    activation_function: str = setting("tanh", **ACTIVATION)
    precision: Precision = setting("default", **PRECISION)
    trainable: bool | tuple[bool, ...] = setting(
        True,
        doc=(
            "Train the parameters; a list, one value a layer, trains the net only when all are "
            "true."
        ),
    )
    seed: int | None = setting(
        None, minimum=0, doc="Seed of the initial parameters; left out, they are random."
    )
    atom_ener: tuple[float | None, ...] = setting(
        (),
        doc=(
            "Energy [eV] of a free atom of each type; null leaves a type to the statistics of the "
            "data."
        ),
    )
    rcond: float | None = setting(
        None,
        minimum=0.0,
        doc="Relative cut-off of singular values in the least squares fit of the energy biases.",
    )
    numb_fparam: int = setting(
        0,
        minimum=0,
        doc=(
            "Number of frame parameters: values that all atoms of a frame share, such as an "
            "electronic temperature. "
            "The net reads them beside the descriptor; systems hold them in set.*/fparam.npy "
            "(nframes, numb_fparam)."
        ),
    )
    numb_aparam: int = setting(
        0,
        minimum=0,
        doc=(
            "Number of atomic parameters: values of each atom that the net reads beside the "
            "descriptor; systems hold "
            "them in set.*/aparam.npy (nframes, natoms * numb_aparam)."
        ),
    )
    use_aparam_as_mask: bool = setting(
        False,
        needs=(above_zero("numb_aparam"),),
        doc=(
            "Leave the atomic parameters out of the net. As in deepmd-kit's PyTorch code, the data "
            "still hold them, "
            "and they mask no atom."
        ),
    )
    default_fparam: tuple[float, ...] | None = setting(
        None,
        doc="Frame parameters of frames without fparam.npy, and of predictions that give none.",
    )
    dim_case_embd: int = setting(
        0,
        minimum=0,
        doc="Branches of the multi-task model that these parameters come from; 0 without branches.",
    )

    @property
    def net_parameters(self) -> dict[str, int]:
        """How many parameters of each kind the net reads, in the order of its input."""
        numbers = {
            "fparam": self.numb_fparam,
            "aparam": 0 if self.use_aparam_as_mask else self.numb_aparam,
        }
        return {name: number for name, number in numbers.items() if number}

    rules = (
        Rule(("trainable", "neuron"), _one_flag_a_layer),
        Rule(("default_fparam", "numb_fparam"), _a_default_for_each),
    )
    hints: ClassVar[dict[str, str]] = dict.fromkeys(
        ("E0s", "e0s", "isolated_atom_energies"), "atom_ener"
    )
    foreign: ClassVar[dict[str, Foreign]] = {"layer_name": Foreign("layers shared by name")}
