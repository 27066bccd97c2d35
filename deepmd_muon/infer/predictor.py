"""A trained model as a function of positions.

`Predictor` returns energies, forces, virials and atomic energies as NumPy arrays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import checkpoint_path, read_checkpoint, understood
from deepmd_muon.data import Frames, NeighborError, Parameters, build_neighbors, stack_neighbors
from deepmd_muon.data.errors import naming_frame, renumbering_frames
from deepmd_muon.data.frames import FRAME_PARAMETERS, charge_spin_problem, longest_vector
from deepmd_muon.data.neighbors.lists import FrameNeighbors
from deepmd_muon.infer.device_call import DenseError, DeviceCalls
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.frozen import FrozenModel, is_frozen
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.model import DescriptorModel, EnergyModel, Structures, build_model
from deepmd_muon.model.deepmd_kit import (
    from_deepmd_kit,
    min_distance_of,
    naming_of,
    saved_branches,
)
from deepmd_muon.model.nn import triton_support


def load_model(
    path: str | os.PathLike[str], *, ema: bool = False, head: str | None = None
) -> EnergyModel:
    """Load the model of a checkpoint, of this package or of deepmd-kit.

    Parameters
    ----------
    path
        The checkpoint; ".pt" may be left out.
    ema
        Take the averaged weights instead of those of the last step.
    head
        Name or alias of the branch of a multi-task checkpoint.

    Raises
    ------
    CheckpointError
        When the file is not a checkpoint, or has no averaged weights and `ema` asks for them.
    """
    path = checkpoint_path(path)
    checkpoint = read_checkpoint(path)
    with understood(path):
        settings, state = from_deepmd_kit(checkpoint["model"], head)
        model = build_model(settings)
        model.load_state_dict(state)
        if ema:
            _take_averages(model, checkpoint, path, head)
    return model


def load_min_distance(path: str | os.PathLike[str], *, head: str | None = None) -> float:
    """Return the smallest distance in the training data of a checkpoint [Å].

    Negative if it is unknown.
    """
    path = checkpoint_path(path)
    checkpoint = read_checkpoint(path)
    with understood(path):
        return min_distance_of(checkpoint["model"], head)


def _take_averages(
    model: EnergyModel, checkpoint: dict[str, Any], path: Path, head: str | None
) -> None:
    if "ema" not in checkpoint:
        raise CheckpointError(
            f"{path} has no averaged weights; training.enable_ema was off in that run"
        )
    own_name_of = naming_of(model)
    averages = {own_name_of(name): x for name, x in checkpoint["ema"]["model"].items()}
    branches = saved_branches(checkpoint["model"])
    prefix = f"{branches[head]}." if branches and head else ""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average = averages[prefix + name]
            fits = average.shape == parameter.shape and average.is_floating_point()
            if not fits or not average.isfinite().all():
                raise CheckpointError(
                    f"{path}: the average of {name} must be finite numbers of shape "
                    f"{tuple(parameter.shape)}; found {average.dtype} of shape "
                    f"{tuple(average.shape)}: take another checkpoint, or the plain weights"
                )
            parameter.copy_(average)


class Predictor:
    """Evaluate a model on any number of frames, in batches that fit the device.

    Parameters
    ----------
    model
        The model, or the path of a checkpoint or of a frozen file (".pth").
    device
        Where to compute; by default a GPU when there is one.
    ema
        Take the averaged weights of the checkpoint.
    head
        Name or alias of the branch of a multi-task checkpoint.
    batch_atoms
        Atoms computed at once, at least one frame; by default 16384 on a GPU and 1024 elsewhere. If
        a GPU runs out of memory, this is halved, for later calls too.
    trust
        Run a frozen file even if it calls operators that no potential needs. It may then do
        anything.

    Attributes
    ----------
    resident
        The model that a GPU evaluates with lists and positions in its memory: that of the
        checkpoint, or the one that a frozen file was made from. None if the host finds neighbours.
    """

    def __init__(
        self,
        model: EnergyModel | str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        ema: bool = False,
        head: str | None = None,
        batch_atoms: int | None = None,
        trust: bool = False,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.model: EnergyModel | FrozenModel
        if isinstance(model, EnergyModel):
            self.model = model.to(self.device).eval()
        elif is_frozen(model):
            if ema:
                raise CheckpointError(
                    f"{model} holds one set of weights; choose averaged ones when you freeze: --ema"
                )
            self.model = FrozenModel(model, self.device, trust=trust)
        else:
            self.model = load_model(model, ema=ema, head=head).to(self.device).eval()
        self.resident: EnergyModel | None = None
        if triton_support.usable(self.device):
            if isinstance(self.model, EnergyModel):
                self.resident = self.model
            else:
                self.resident = self.model.restored()
        self._device_calls: DeviceCalls | None = None
        # Lists on the device have no place for spins.
        if self.resident is not None and not self.parameters.spin:
            self._device_calls = DeviceCalls(self.resident)
        # A thousand atoms saturate a CPU; a GPU needs more.
        self.batch_atoms = batch_atoms or (16384 if self.device.type == "cuda" else 1024)

    @property
    def type_map(self) -> tuple[str, ...]:
        """Element names of the types."""
        return tuple(self.model.type_map)

    @property
    def parameters(self) -> Parameters:
        """The frame and atomic parameters that the model reads."""
        if isinstance(self.model, FrozenModel):
            return self.model.parameters
        return Parameters.of(self.model.settings)

    def set_default_fparam(self, values: Sequence[float]) -> None:
        """Let frames without frame parameters have these.

        Raises
        ------
        PredictionInputError
            When the model is a frozen one or one of deepmd-kit.
        """
        model = self.model
        if not isinstance(model, DescriptorModel):
            raise PredictionInputError(
                "frame parameters of a frozen model, or one of deepmd-kit, cannot be set: take the "
                "checkpoint, or train with fitting_net/default_fparam"
            )
        fitting_net = model.atomic_model.fitting_net
        settings = replace(fitting_net.settings, default_fparam=tuple(values))
        fitting_net.settings = settings
        fitting_net.default_fparam_tensor = torch.tensor(
            values, dtype=fitting_net.dtype, device=self.device
        )
        model.settings = replace(model.settings, fitting_net=settings)

    def predict(
        self,
        coord: np.ndarray,
        box: np.ndarray | None,
        atype: np.ndarray,
        fparam: np.ndarray | None = None,
        aparam: np.ndarray | None = None,
        charge_spin: np.ndarray | None = None,
        spin: np.ndarray | None = None,
    ) -> Prediction:
        """Evaluate frames given as arrays.

        Parameters
        ----------
        coord : array, (nframes, natoms, 3) or (natoms, 3)
            Positions [Å], inside the cell or not.
        box : array, (nframes, 3, 3) or (3, 3), or None
            Cell vectors as rows [Å]; None without periodic boundaries.
        atype : array of int, (nframes, natoms) or (natoms,)
            Types as indices into `type_map`; one row serves all frames.
        fparam : array, (nframes, numb_fparam) or (numb_fparam,), optional
            Frame parameters, if the model reads some; by default those of the model.
        aparam : array, optional
            Atomic parameters (nframes, natoms, numb_aparam), (natoms, numb_aparam) or
            (numb_aparam,), if the model reads some.
        charge_spin : array, (nframes, 2) or (2,), optional
            Charge [e] and spin of frames, if the model embeds them; by default those of the model.
        spin : array, (nframes, natoms, 3) or (natoms, 3), optional
            Spin vectors of atoms, if the model reads them.

        Raises
        ------
        PredictionInputError
            When shapes do not fit together, the model lacks a type, or it reads other parameters.
        """
        coord = np.asarray(coord, dtype=np.float64)
        if coord.ndim == 2 and coord.shape[1] == 3:
            coord = coord[None]
        if coord.ndim != 3 or coord.shape[2] != 3:
            raise PredictionInputError(
                f"coord must be (nframes, natoms, 3); found shape {coord.shape}"
            )
        nframes, natoms, _ = coord.shape
        try:
            types = np.broadcast_to(np.asarray(atype, dtype=np.int32), (nframes, natoms)).copy()
        except ValueError as error:
            raise PredictionInputError(
                f"atype must be indices into type_map {self.type_map}, of shape (nframes, natoms) "
                f"or (natoms,) with {natoms} atoms; found {np.asarray(atype).dtype} of shape "
                f"{np.shape(atype)}"
            ) from error
        widths = self.parameters
        frames = Frames(
            atype=types,
            coord=coord,
            box=None if box is None else _cells(box, nframes),
            fparam=_broadcast("fparam", fparam, (nframes, widths.fparam)),
            aparam=_broadcast("aparam", aparam, (nframes, natoms, widths.aparam)),
            charge_spin=_broadcast("charge_spin", charge_spin, (nframes, widths.charge_spin)),
            spin=_broadcast("spin", spin, (nframes, natoms, widths.spin)),
        )
        return self.evaluate(frames)

    def evaluate(self, frames: Frames) -> Prediction:
        """Evaluate frames of the data room; their labels are ignored."""
        ntypes = len(self.type_map)
        frames = self._with_parameters(frames)
        if frames.atype.max(initial=-1) >= ntypes:
            raise PredictionInputError(
                f"type {frames.atype.max()} found, but the model has {ntypes}: {self.type_map}"
            )
        if frames.spin is not None and isinstance(self.model, EnergyModel):
            self.model.reach_spins(longest_vector(frames.spin))
        predictions: list[Prediction] = []
        done = 0
        while done < frames.nframes:
            count = max(1, self.batch_atoms // max(1, frames.natoms))
            rows = slice(done, min(done + count, frames.nframes))
            try:
                with renumbering_frames(range(rows.start, rows.stop)):
                    predictions.append(self._evaluate_batch(frames.rows(rows)))
            except torch.cuda.OutOfMemoryError:
                if rows.stop - rows.start == 1:
                    raise
                if self._device_calls is not None:
                    self._device_calls.clear()
                # The same frames again, half as many at once.
                self.batch_atoms = max(1, (rows.stop - rows.start) // 2 * frames.natoms)
                continue
            done = rows.stop
        if not predictions:
            return Prediction.zeros(0, frames.natoms)
        return predictions[0] if len(predictions) == 1 else Prediction.concatenate(predictions)

    def _with_parameters(self, frames: Frames) -> Frames:
        """Return frames with the parameters that the model reads.

        Frames without any keep none if the model has a default of each.

        Raises
        ------
        PredictionInputError
            If values are missing, or there are more or fewer.
        """
        parameters = self.parameters
        defaults = {}
        for name in FRAME_PARAMETERS:
            values = getattr(frames, name)
            width = getattr(parameters, name)
            default = parameters.default(name)
            if values is None and default is not None:
                defaults[name] = np.tile(np.array(default), (frames.nframes, 1))
            else:
                _check_width(name, "of each frame", values, width)
        _check_width("aparam", "of each atom", frames.aparam, parameters.aparam)
        if frames.spin is None and parameters.default_spin is not None:
            defaults["spin"] = np.zeros_like(frames.coord)
        else:
            _check_width("spin", "of each atom", frames.spin, parameters.spin)
        if frames.charge_spin is not None:
            problem = charge_spin_problem(frames.charge_spin)
            if problem is not None:
                raise PredictionInputError(problem)
        if frames.frame_parameters is None:
            defaults = {name: x for name, x in defaults.items() if name not in FRAME_PARAMETERS}
        return replace(frames, **defaults)

    def _evaluate_batch(self, frames: Frames) -> Prediction:
        model = self.model
        call = None
        if self._device_calls is not None:
            periodic = frames.box is not None
            call = self._device_calls.of(frames.atype, self.device, periodic=periodic)
        if call is not None:
            with contextlib.suppress(DenseError):  # the host finds more neighbours
                parameters = frames.frame_parameters
                return call.predict(frames.coord, frames.box, parameters, frames.aparam)
        if isinstance(model, FrozenModel):
            return model.predict(
                frames.coord,
                frames.box,
                frames.atype,
                fparam=frames.frame_parameters,
                aparam=frames.atomic_parameters,
            )
        neighbors = stack_neighbors(
            [_build_neighbors(model, frames, k) for k in range(frames.nframes)]
        )
        structures = Structures.of(frames, neighbors, model.ntypes, self.device)
        with torch.no_grad():
            output = model(structures, force=True, virial=True)
        arrays = {
            f.name: output[f.name].detach().cpu().numpy()
            for f in fields(Prediction)
            if f.name in output
        }
        return Prediction(**arrays)


def _check_width(name: str, owner: str, values: np.ndarray | None, width: int) -> None:
    if width and (values is None or values.shape[-1] != width):
        count = "none" if values is None else values.shape[-1]
        raise PredictionInputError(
            f"the model reads {width} parameters {owner} ({name}); found {count}"
        )


def _build_neighbors(model: EnergyModel, frames: Frames, k: int) -> FrameNeighbors:
    with naming_frame(k):
        return build_neighbors(
            frames.coord[k],
            frames.cell(k),
            frames.atype[k],
            model.rcut,
            model.sel,
            model.by_type,
            len(model.type_map),
            model.neighbors.inner,
        )


@contextlib.contextmanager
def naming(system: str, numbers: np.ndarray, frames: Frames) -> Iterator[None]:
    """Add the name of the system, and the frame's number `numbers[k]` there, to a NeighborError.

    A cell of zeros is an error here. `Predictor.predict` reads it as no cell, but a system without
    a cell has a file `nopbc`.
    """
    with renumbering_frames(numbers.tolist(), system):
        if frames.box is not None:
            has_cell = frames.box.any(axis=(1, 2))
            if not has_cell.all():
                raise NeighborError(
                    "the cell has volume 0 Å³; a system without a cell needs a file nopbc",
                    int(has_cell.argmin()),
                )
        yield


def _cells(box: Any, nframes: int) -> np.ndarray:
    cells = np.asarray(box, dtype=np.float64)
    if cells.shape not in {(3, 3), (1, 3, 3), (nframes, 3, 3)}:
        raise PredictionInputError(
            f"box must be (nframes, 3, 3) or (3, 3), cell vectors as rows, for {nframes} frames; "
            f"found {cells.shape}"
        )
    return np.array(np.broadcast_to(cells, (nframes, 3, 3)))


def _broadcast(name: str, values: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return parameters of all frames, or None.

    A model without such parameters must get none.
    """
    if values is None:
        return None
    if not shape[-1]:
        raise PredictionInputError(
            f"the model reads no {name}; found an array of shape {np.shape(values)}"
        )
    array = np.asarray(values, dtype=np.float64)
    if array.size == np.prod(shape):
        return np.array(array.reshape(shape))
    try:
        return np.array(np.broadcast_to(array, shape))
    except ValueError as error:
        raise PredictionInputError(f"{name} must be {shape}; found shape {array.shape}") from error
