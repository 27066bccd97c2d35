"""Fine-tuning with replay: the two-branch run, and the files of structures that it replays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from deepmd_muon.argcheck import Input, Settings, ValidationDataSettings
from deepmd_muon.argcheck.replay import check_replay, replay_of, replayed_section, with_replay
from deepmd_muon.checkpoint_file.file import checkpoint_path, understood
from deepmd_muon.data import Frames, TypeMapError, open_systems
from deepmd_muon.data.writing import write_hdf5
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, saved_branches
from deepmd_muon.model.frozen_weights import read_weights
from deepmd_muon.model.settings import ModelSettings, changed
from deepmd_muon.replay.structures import (
    STRUCTURES_PER_WALKER,
    ReplayError,
    as_systems,
    choose_starts,
    draw,
)
from deepmd_muon.section import thaw

log = logging.getLogger(__name__)

PSEUDO = "pseudo"
"""In place of data: structures that the checkpoint draws and labels."""
# One of so many walkers is held out for validation.
_HELD_OUT = 10


@dataclass(frozen=True)
class Prepared:
    """A run with replay.

    Attributes
    ----------
    run_input
        The two-branch input.
    make_data
        Writes the data that the input names and that do not exist yet.
    """

    run_input: Input
    make_data: Callable[[], None]


def prepare(single: Input, checkpoint: str, branch: str | None, replay: Sequence[str]) -> Prepared:
    """Make the two-branch run of fine-tuning a checkpoint, or one of its branches, with replay.

    Parameters
    ----------
    single
        The input of one model.
    replay
        Data of the checkpoint's kind, or "pseudo" alone.

    Raises
    ------
    ReplayError
        When the checkpoint has several branches and none is named, or "pseudo" comes with data.
    InputError
        When the input cannot be fine-tuned so.
    """
    settings = check_replay(single)
    path = checkpoint_path(checkpoint)
    content = read_weights(path)
    with understood(path):
        branches = saved_branches(content["model"])
        if branches and branch not in branches:
            wrong_branch = f"; found {branch!r}" if branch else ""
            raise ReplayError(
                f"--replay continues one branch of {path}, which has {', '.join(branches)}: name "
                f"it with --model-branch{wrong_branch}"
            )
        head = branches[branch] if branch and branches else None
        saved_model, weights = from_deepmd_kit(content["model"], head)
    model = settings.model
    if not model.type_map:
        model = changed(model, {"type_map": saved_model.type_map}, "model")
    validation = replay_of(settings).validation_data
    if PSEUDO not in replay:
        training = replayed_section(settings, replay)
        return Prepared(
            run_input=with_replay(single, model, head, training, validation), make_data=lambda: None
        )

    if len(replay) > 1:
        raise ReplayError(f"--replay takes data or {PSEUDO!r} alone; found {' '.join(replay)}")
    net = saved_model.fitting_net
    parameters = (getattr(net, "numb_fparam", 0), getattr(net, "numb_aparam", 0))
    if any(parameters) or saved_model.spins.read:
        raise ReplayError(
            f"the model of {path} takes parameters of frames or atoms or their spins, for which {PSEUDO!r} has no "
            "values: replay data that it was trained on (--replay DATA)"
        )
    starts = _starts(settings, saved_model)
    # The name says what the structures depend on, so that a second run reuses the files.
    stem = f"{settings.training.save_ckpt}.replay-{_digest(settings, weights, starts)}"
    training_file = Path(f"{stem}.hdf5")
    validation_file = Path(f"{stem}.valid.hdf5")
    training = replayed_section(settings, [str(training_file)])
    if validation is None:
        validation = ValidationDataSettings(
            systems=(str(validation_file),), batch_size=training.batch_size, numb_btch="all"
        )

    def make_data() -> None:
        if not (training_file.exists() and validation_file.exists()):
            _write(Predictor(path, head=head), starts, settings, training_file, validation_file)

    return Prepared(
        run_input=with_replay(single, model, head, training, validation), make_data=make_data
    )


def _digest(settings: Settings, weights: Mapping[str, Tensor], starts: Frames) -> str:
    """Return twelve digits that depend on all that decides which structures are drawn."""
    plain = [thaw(replay_of(settings)), settings.training.seed]
    digest = hashlib.sha256(json.dumps(plain).encode())
    arrays = [tensor.detach().cpu().numpy() for _, tensor in sorted(weights.items())]
    for array in (*arrays, starts.coord, starts.atype):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]


def _starts(settings: Settings, saved_model: ModelSettings) -> Frames:
    """Choose structures of the training data whose elements the checkpoint knows."""
    training_data = settings.training.training_data
    systems = []
    for system in open_systems(
        training_data.systems,
        settings.model.type_map or None,
        training_data.reading,
        training_data.rglob_patterns,
    ):
        with contextlib.suppress(TypeMapError):  # raised by a system with another element
            systems.append(system.with_types(saved_model.type_map))
    if not systems:
        raise ReplayError(
            "every system of the training data has elements beside those of the checkpoint "
            f"({', '.join(saved_model.type_map)}), so that it can draw none like them: replay data "
            "that it was trained on (--replay DATA)"
        )
    n_walkers = -(-replay_of(settings).frames // STRUCTURES_PER_WALKER)
    return choose_starts(systems, n_walkers, settings.training.seed or 0)


def _write(
    predictor: Predictor,
    starts: Frames,
    settings: Settings,
    training_file: Path,
    validation_file: Path,
) -> None:
    """Draw structures and write them, all of one walker to the same file."""
    replay = replay_of(settings)
    seed = settings.training.seed or 0
    log.info(
        "drawing %d structures from dynamics of the checkpoint, to be replayed",
        STRUCTURES_PER_WALKER * starts.nframes,
    )
    # Walkers take the temperatures in turn, so each temperature is among the last ones, too.
    cut = starts.nframes - max(1, starts.nframes // _HELD_OUT)
    walkers = {training_file: slice(0, cut), validation_file: slice(cut, None)}
    for k, (path, rows) in enumerate(walkers.items()):
        frames = draw(
            predictor,
            starts.rows(rows),
            temperatures=replay.temperatures,
            steps=replay.steps,
            strain=replay.strain,
            seed=2 * seed + k,
        )
        if not frames:
            raise ReplayError(
                "no dynamics of the checkpoint kept to its temperature: replay data (--replay DATA)"
            )
        if not path.exists():
            write_hdf5(as_systems(frames, predictor.type_map, path.name), path)
        force = np.concatenate([np.asarray(frame.force).ravel() for frame in frames])
        log.info(
            "%s: %d structures, forces of %.3g eV/Å (root mean square), at most %.3g",
            path,
            len(frames),
            np.sqrt(np.square(force).mean()),
            np.abs(force).max(),
        )
