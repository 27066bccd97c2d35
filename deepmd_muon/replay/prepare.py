"""Fine-tuning with replay: which run it is, and the file of structures that the checkpoint labels."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepmd_muon.argcheck import Input, Settings, ValidationDataSettings
from deepmd_muon.argcheck.replay import check_replay, replay_of, replayed_section, with_replay
from deepmd_muon.checkpoint_file.file import checkpoint_path, read_checkpoint, understood
from deepmd_muon.data import Frames, System, TypeMapError, open_systems
from deepmd_muon.data.writing import write_hdf5
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, saved_branches
from deepmd_muon.model.settings import ModelSettings, changed
from deepmd_muon.replay.structures import KEPT, ReplayError, as_systems, choose_starts, draw
from deepmd_muon.section import thaw

log = logging.getLogger(__name__)

#: Stands for structures of the checkpoint's own in the place of data.
PSEUDO = "pseudo"
# Of structures that the checkpoint draws: one of so many walkers is held out.
_HELD_OUT = 10


@dataclass(frozen=True)
class Prepared:
    """A run with replay."""

    given: Input  # the two-branch input
    make_data: Callable[[], None]  # writes the data that the input names and that do not exist yet


def prepare(given: Input, checkpoint: str, branch: str | None, replay: Sequence[str]) -> Prepared:
    """Make the two-branch run of fine-tuning a checkpoint, or one of its branches, with replay.

    `replay` is data of the checkpoint's kind, or "pseudo" alone.

    Raises
    ------
    ReplayError
        When the checkpoint has several branches and none is named, or "pseudo" stands beside data.
    InputError
        When the input cannot be fine-tuned so.
    """
    settings = check_replay(given)
    path = checkpoint_path(checkpoint)
    content = read_checkpoint(path, ("optimizer", "ema"))
    with understood(path):
        saved = saved_branches(content["model"])
        if saved and branch not in saved:
            raise ReplayError(
                f"--replay continues one branch of {path}, which has {', '.join(saved)}: name it "
                "with --model-branch" + (f"; found {branch!r}" if branch else "")
            )
        head = saved[branch] if branch and saved else None
        present, weights = from_deepmd_kit(content["model"], head)
    model = settings.model
    if not model.type_map:
        model = changed(model, {"type_map": present.type_map}, "model")
    if PSEUDO not in replay:
        training = replayed_section(settings, replay)
        return Prepared(
            with_replay(given, model, head, training, replay_of(settings).validation_data),
            lambda: None,
        )
    if len(replay) > 1:
        raise ReplayError(f"--replay takes data or {PSEUDO!r} alone; found {' '.join(replay)}")
    net = present.fitting_net
    if getattr(net, "numb_fparam", 0) or getattr(net, "numb_aparam", 0):
        raise ReplayError(
            f"the model of {path} takes parameters of frames or atoms, for which {PSEUDO!r} has no "
            "values: replay data that it was trained on (--replay DATA)"
        )
    starts = _starts(settings, present)
    digest = hashlib.sha256(
        json.dumps([thaw(replay_of(settings)), settings.training.seed]).encode()
    )
    for array in (
        *(x.detach().cpu().numpy() for _, x in sorted(weights.items())),
        starts.coord,
        starts.atype,
    ):
        digest.update(np.ascontiguousarray(array).tobytes())
    stem = f"{settings.training.save_ckpt}.replay-{digest.hexdigest()[:12]}"
    places = Path(f"{stem}.hdf5"), Path(f"{stem}.valid.hdf5")
    training = replayed_section(settings, [str(places[0])])
    held_out = replay_of(settings).validation_data or ValidationDataSettings(
        systems=(str(places[1]),), batch_size=training.batch_size, numb_btch="all"
    )

    def make_data() -> None:
        if not all(place.exists() for place in places):
            _write(Predictor(path, head=head), starts, settings, places)

    return Prepared(with_replay(given, model, head, training, held_out), make_data)


def _starts(settings: Settings, checkpoint: ModelSettings) -> Frames:
    """Choose structures of the training data that the checkpoint knows all elements of."""
    section, replay = settings.training.training_data, replay_of(settings)
    found = open_systems(
        section.systems,
        settings.model.type_map or None,
        section.label_keys,
        section.rglob_patterns,
        keep_unconverged=section.keep_unconverged,
    )
    systems = [
        known for system in found if (known := _with_types(system, checkpoint.type_map)) is not None
    ]
    if not systems:
        raise ReplayError(
            "every system of the training data has elements beside those of the checkpoint "
            f"({', '.join(checkpoint.type_map)}), so that it can draw none like them: replay data "
            "that it was trained on (--replay DATA)"
        )
    seed = settings.training.seed or 0
    return choose_starts(systems, -(-replay.frames // KEPT), seed)


def _with_types(system: System, type_map: Sequence[str]) -> System | None:
    """Return a system with other types; None where it has an element that they lack."""
    try:
        return system.with_types(type_map)
    except TypeMapError:
        return None


def _write(
    predictor: Predictor, starts: Frames, settings: Settings, places: tuple[Path, Path]
) -> None:
    """Draw structures and write them: walkers that are held out wholly, the others for training."""
    replay, seed = replay_of(settings), settings.training.seed or 0
    log.info(
        "drawing %d structures from dynamics of the checkpoint, to be replayed",
        KEPT * starts.nframes,
    )
    for k, (place, held_out) in enumerate(zip(places, (False, True), strict=True)):
        # The last walkers: each temperature is among them, as among the others.
        cut = starts.nframes - max(1, starts.nframes // _HELD_OUT)
        rows = slice(cut, None) if held_out else slice(0, cut)
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
        if not place.exists():
            write_hdf5(as_systems(frames, predictor.type_map, place.name), place)
        force = np.concatenate([np.asarray(frame.force).ravel() for frame in frames])
        log.info(
            "%s: %d structures, forces of %.3g eV/Å (root mean square), at most %.3g",
            place,
            len(frames),
            np.sqrt(np.square(force).mean()),
            np.abs(force).max(),
        )
