"""Compression: frozen files with tables in place of embedding nets, compared with the nets before they are written."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.freeze import (
    TOLERANCE,
    Difference,
    difference_of,
    precisions_of,
    program_of,
    save,
)
from deepmd_muon.deploy.program import Program, check_coverage
from deepmd_muon.deploy.structures import Structure, structures_with_close_atoms
from deepmd_muon.files import make_folder_of, replacement
from deepmd_muon.infer.frozen import FrozenModel
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import EnergyModel, build_model
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE, settings_of
from deepmd_muon.model.fitting.ener.scripted import ScriptedEnergyFitting
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.model.scripted.dense import Dense

log = logging.getLogger(__name__)

STEPS = tuple(0.4 * 0.5**k for k in range(7))
"""Intervals of the tables to choose from, in units of the nets' input."""

EXTRAPOLATE = 2.0
"""The tables reach by default to this multiple of the largest 1/distance in the training data."""

FORCE = 1e-6
"""Largest change of a force that a chosen step may cause [eV/Å]."""

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Allowance for rounding errors in addition to `FORCE`, relative to the largest force."""

ASSUMED_DISTANCE = 0.5  # [Å] if that of the data is unknown; bonds with hydrogen have 0.74 and more


@dataclass(frozen=True)
class Compression:
    """The result of `compress`.

    Attributes
    ----------
    difference
        Between the file and the model on random structures, some with atoms at and below the smallest distance.
    step
        Interval of the tables in the input of the nets.
    nearest
        Smallest distance that the tables cover [Å].
    allowed
        Largest difference of forces with which a step is accepted [eV/Å].
    """

    difference: Difference
    step: float
    nearest: float
    allowed: float


def compress(
    model: EnergyModel,
    output: str | os.PathLike[str],
    *,
    min_distance: float = UNKNOWN_DISTANCE,
    step: float | None = None,
    extrapolate: float = EXTRAPOLATE,
) -> Compression:
    """Write a model as a frozen file with tables in place of its embedding nets.

    Parameters
    ----------
    model
        The model, on the CPU.
    output
        The file; it appears only after the comparison.
    min_distance
        Smallest distance in the training data [Å]; 0.5 is taken if it is negative, or infinite as in data without
        neighbours.
    step
        Interval of the tables in the input of the nets; by default the longest of `STEPS` that changes forces by at
        most `FORCE`.
    extrapolate
        The tables reach down to min_distance/extrapolate. Below that, the program evaluates the nets themselves.

    Raises
    ------
    ModelError
        When a part of the model cannot be frozen, or a table would be too large.
    FreezeError
        When the descriptor has no tables, or no step is fine enough.
    """
    tabulated = _table_of(model)
    settings = model.settings.descriptor
    covers = getattr(tabulated, "covers", None)
    check_coverage(f"compressed {DESCRIPTORS.name_of(settings)!r}", covers, settings)
    program = program_of(model, min_distance)
    with_nets: Any = program.descriptor
    closest = min_distance if 0 < min_distance < math.inf else ASSUMED_DISTANCE
    nearest = closest / extrapolate
    reference = Predictor(model, device="cpu")
    structures = structures_with_close_atoms(model, closest)
    expected = [reference.predict(*structure) for structure in structures]
    precisions = precisions_of(model)
    tolerance = max(TOLERANCE[precision] for precision in precisions)
    of_nets = difference_of(_paired(expected, [evaluate(program, s) for s in structures]))
    if not of_nets.relative <= tolerance:
        raise FreezeError(
            f"the program with the nets themselves differs from the model by {of_nets} (relative "
            f"{of_nets.relative:.1e}, allowed {tolerance:.0e}); nothing was written to {output}: report this with "
            "the input file"
        )
    rounding = max(ROUNDING[precision] for precision in precisions)
    allowed = FORCE + rounding * max(float(np.abs(one.force).max()) for one in expected)
    for tried in STEPS if step is None else (step,):
        program.descriptor = tabulated(with_nets, step=tried, nearest=nearest)
        of_tables = [evaluate(program, structure) for structure in structures]
        difference = difference_of(_paired(expected, of_tables))
        log.debug("step %g: %s", tried, difference)
        if difference.force <= allowed:
            break
    else:
        if step is None or not difference.relative < 1e-2:
            raise FreezeError(
                f"tables of step {tried:g} change {difference}, where {allowed:.0e} eV/Å was allowed; nothing was "
                "written: use dp freeze, whose file holds the nets (activations with a kink, like relu, need them)"
            )
    program.descriptor.told = False
    output = Path(output)
    make_folder_of(output)
    with replacement(output) as temporary:
        save(program, model, temporary, output)
        frozen = Predictor(temporary, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the structures with close atoms
            of_file = [frozen.predict(*structure) for structure in structures]
        written = difference_of(_paired(of_tables, of_file))
        if not written.relative <= tolerance:
            raise FreezeError(
                f"the frozen file differs from the program in it by {written} (relative {written.relative:.1e}, "
                f"allowed {tolerance:.0e}); nothing was written to {output}: report this with the input file"
            )
    return Compression(difference_of(_paired(expected, of_file)), tried, nearest, allowed)


def _paired(one: list[Prediction], other: list[Prediction]) -> list[tuple[Prediction, Prediction]]:
    return list(zip(one, other, strict=True))


def _table_of(model: EnergyModel) -> Any:
    """Return the class of the compressed descriptor."""
    found = DESCRIPTORS.tabulated(model.settings.descriptor)
    if found is None:
        kind = DESCRIPTORS.name_of(model.settings.descriptor)
        raise FreezeError(
            f"the descriptor {kind!r} cannot be compressed: tables need features that depend on one distance, as those "
            "of se_e2_a and of DPA-1 without attention do. Nothing was written: use dp freeze"
        )
    return found


def evaluate(program: Program, structure: Structure) -> Prediction:
    """Return the results of a program that is not in a file."""
    coord, atype, box, fparam, aparam = (
        None if array is None else torch.from_numpy(array)[None]
        for array in structure.for_program()
    )
    with warnings.catch_warnings(), torch.enable_grad():  # a program may differentiate
        warnings.simplefilter("ignore", UserWarning)
        results = program(coord, atype, box, fparam, aparam)
    values = {name: value.detach().double().numpy() for name, value in results.items()}
    return Prediction(
        values["energy"][:, 0], values["force"], values["virial"], values["atom_energy"][..., 0]
    )


def restored(path: str | os.PathLike[str], *, trust: bool = False) -> tuple[EnergyModel, float]:
    """Return the model of a frozen file of this package, and the smallest distance in its data [Å], −1 when unknown.

    Raises
    ------
    CheckpointError
        When the file cannot be read.
    FreezeError
        When it does not hold the nets of its descriptor: of the nets of types, files of DPA-1 hold only the results.
    """
    program: Any = FrozenModel(path, "cpu", trust=trust).program
    model = build_model(settings_of(json.loads(program.get_model_def_script())))
    _table_of(model)
    if not hasattr(program.descriptor, "nets"):
        kind = DESCRIPTORS.name_of(model.settings.descriptor)
        raise FreezeError(
            f"{path} does not hold all nets of {kind!r}: give the checkpoint, dp compress -i model.ckpt.pt"
        )
    try:
        with torch.no_grad():
            _fill(model, program)
    except (RuntimeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not hold the nets of its model section: {error}"
        ) from error
    known = hasattr(program, "get_min_nbor_dist")  # not in older files
    return model, float(program.get_min_nbor_dist()) if known else UNKNOWN_DISTANCE


def _fill(model: EnergyModel, program: Any) -> None:
    """Copy the weights of a program into a model."""
    own: Any = model.atomic_model
    sea, net = own.descriptor.sea, own.fitting_net
    for collection, saved in (
        (sea.filter_layers, program.descriptor.nets),
        (net.filter_layers, program.fitting_net.nets),
    ):
        for network, layers in zip(collection.networks, saved, strict=True):
            for layer, values in zip(
                network.tensors, (Dense(*each) for each in layers), strict=True
            ):
                layer.matrix.copy_(values.matrix)
                layer.bias.copy_(values.bias)
                if layer.idt is not None:
                    layer.idt.copy_(values.idt)
    stddev = 1.0 / program.descriptor.scale
    sea.stddev.copy_(stddev.unsqueeze(1).expand_as(sea.stddev))
    sea.mean.copy_((-program.descriptor.empty_row * stddev).unsqueeze(1).expand_as(sea.mean))
    own.out_bias[0, :, 0] = program.bias
    if net.case_embd is not None:
        net.case_embd.copy_(program.fitting_net.branch)
    first = 0
    for name in ("fparam", "aparam"):
        mean, scale = getattr(net, f"{name}_avg"), getattr(net, f"{name}_inv_std")
        if mean is not None:
            mean.copy_(program.fitting_net.parameter_mean[first : first + len(mean)])
            scale.copy_(program.fitting_net.parameter_scale[first : first + len(mean)])
            first += len(mean)
    # A program subtracts the nets' values in vacuum from the bias.
    net.bias_atom_e[:, 0] += program.fitting_net.bias - ScriptedEnergyFitting(net).bias
