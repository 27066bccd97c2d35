"""A first input for data that nobody has trained on: every choice with its reason."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepmd_muon.argcheck import normalize
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.data import DataError, System
from deepmd_muon.data.checks.header_words import unread_words
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.isolated_atoms import isolated_energies
from deepmd_muon.data.opening import check_labels, elements_of
from deepmd_muon.data.sampling.splitting import Share, split
from deepmd_muon.data.writing import formula_of, write_npy
from deepmd_muon.files import make_folder_of, whole_file
from deepmd_muon.label_keys import Reading

# se_e2_a has a network for every type of neighbour; beyond so many types one for all of them learns
# from more data. On molecules of seven elements se_e2_a still is more accurate (doc/molecules.md);
# more were not measured.
_MANY_TYPES = 4
_MANY_TYPES_OF_MOLECULES = 7
# The networks of the race (doc/benchmarks/race.md), on which the default rates were measured.
_DESCRIPTORS: dict[str, dict[str, Any]] = {
    "se_e2_a": {"neuron": [16, 32, 64], "axis_neuron": 8, "type_one_side": True},
    "dpa1": {
        "neuron": [16, 32, 64],
        "axis_neuron": 8,
        "tebd_dim": 8,
        "tebd_input_mode": "concat",
        "type_one_side": True,
        "attn": 64,
        "attn_layer": 2,
        "attn_dotr": True,
        "normalize": True,
        "temperature": 1.0,
        "smooth_type_embedding": True,
        "set_davg_zero": True,
    },
}
# The layer of se_e2_a that reads descriptors. The data determine few of its directions, and Muon moves
# it along the others as fast. With AdamW fewer dynamics of crystals and liquids blow up, and more
# of molecules without a cell (doc/benchmarks/stability.md).
_READS_DESCRIPTORS = "*fitting_net*layers.0.matrix"
# In shorter runs that costs 10 to 20 % of the error, and on one of two sets of water gains nothing.
_LONG_RUN = 15_000
_STEPS = 10_000  # of a first potential where that layer stays with Muon
_N_SYSTEMS_SHOWN = 20
_ATOMS_OF_MOLECULES = 120
_SEL_OF_MOLECULES = 120
_BATCH_ATOMS = 32  # as batch_size "auto"
_MIN_CURVE_ROWS = 40  # of the learning curve


class _Prefactor(NamedTuple):
    """Weight of one term of the loss."""

    letter: str  # in the keys start_pref_… and limit_pref_…
    start: float
    limit: float


_PREFACTORS = {
    "energy": _Prefactor("e", 0.02, 1),
    "force": _Prefactor("f", 1000, 1),
    "virial": _Prefactor("v", 0.02, 1),
}


@dataclass(frozen=True)
class Wishes:
    """The command line.

    Attributes
    ----------
    data, valid_data
        Paths of all data, or of training and validation data.
    share
        Share of the frames that validation takes if `valid_data` is empty.
    descriptor
        Kind of the descriptor; None lets the number of types decide.
    rcut
        Cut-off radius [Å].
    steps
        Length of the run; None lets data and descriptor decide.
    type_map
        Types; empty for those of the data.
    reading
        How the data are read.
    folder
        Folder for systems that a split cuts.
    """

    data: tuple[str, ...]
    valid_data: tuple[str, ...]
    share: float
    descriptor: str | None
    rcut: float
    steps: int | None
    type_map: tuple[str, ...]
    reading: Reading
    folder: Path


@dataclass(frozen=True)
class Choice:
    """One setting: its key in the input, its value in words, and the reason."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Data:
    """The data of an input.

    Attributes
    ----------
    type_map
        Names of the types.
    shares
        Number of frames of every system for training and validation.
    training_paths, validation_paths
        What the input names.
    to_write
        Systems to write, by folder; empty if the input names the data as they are.
    """

    type_map: Sequence[str]
    shares: list[Share]
    training_paths: list[str]
    validation_paths: list[str]
    to_write: dict[Path, list[System]]

    @property
    def labels(self) -> set[str]:
        """Labels of training data that the loss can compare with."""
        labels: set[str] = set()
        for share in self.shares:
            if share.train:
                labels |= share.system.labels & _PREFACTORS.keys()
        return labels


@dataclass(frozen=True)
class Proposal:
    """An input and its grounds.

    Attributes
    ----------
    content
        The input of the first model.
    choices
        Settings with their reasons.
    data
        Every system, and what has to be written.
    warnings
        Doubts about the data.
    """

    content: dict[str, Any]
    choices: list[Choice]
    data: Data
    warnings: list[str]

    def write(self, outputs: Sequence[Path]) -> None:
        """Write the split systems and an input for each model; models differ in their seeds.

        Raises
        ------
        WriteError
            When a file cannot be written, or exists by now: another command may have written it.
            The split systems are removed again.
        """
        texts = []
        for seed, output in enumerate(outputs, 1):
            # The first input is in the present folder or names its paths from there.
            top = os.path.relpath(".", output.parent) if seed > 1 else "."
            content = _with_seed(self.content, seed, top)
            texts.append(_encoded(json.dumps(content, indent=2, ensure_ascii=False) + "\n"))
        written: list[Path] = []
        try:
            for folder, systems in self.data.to_write.items():
                write_npy(systems, folder)
                written.append(folder)
            for text, output in zip(texts, outputs, strict=True):
                make_folder_of(output)
                with whole_file(output, new=True) as file:
                    file.write(text)
        except BaseException:
            for folder in written:
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # it holds the other part of the split
                    folder.parent.rmdir()
            raise

    def report(self) -> str:
        """Return the data and the choices as tables."""
        systems = [("system", "formula", "atoms", "cell", "labels", "training", "validation")]
        shares = self.data.shares
        for share in shares[:_N_SYSTEMS_SHOWN]:
            system = share.system
            labels = ", ".join(sorted(system.labels))
            if not system.uniform_labels:
                labels += " (some)"
            systems.append(
                (
                    system.name,
                    formula_of(system),
                    str(system.natoms),
                    "periodic" if system.pbc else "none",
                    labels,
                    str(share.train),
                    str(system.nframes - share.train),
                )
            )
        lines = _table(systems)
        if len(shares) > _N_SYSTEMS_SHOWN:
            lines.append(f"and {len(shares) - _N_SYSTEMS_SHOWN} more systems")
        settings = [("key", "value", "reason")]
        settings += [(choice.key, choice.value, choice.reason) for choice in self.choices]
        lines += ["", *_table(settings), ""]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _encoded(text: str) -> bytes:
    """Return a text in UTF-8.

    Python reads other bytes of a path as halves of surrogate pairs, which no input can hold.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        wrong = os.fsencode(error.object[error.start : error.end])
        raise CommandError(
            f"a path of the data is no UTF-8 ({wrong!r}): an input cannot name it; rename it"
        ) from error


def _with_seed(content: dict[str, Any], seed: int, top: str) -> dict[str, Any]:
    """Return an input with other first weights and another order of the data.

    `top` is the path from its folder to the present one.
    """
    content = copy.deepcopy(content)
    content["model"]["descriptor"]["seed"] = seed
    content["model"]["fitting_net"]["seed"] = seed
    content["training"]["seed"] = seed
    for kind in ("training_data", "validation_data"):
        if kind in content["training"] and top != ".":
            data = content["training"][kind]
            data["systems"] = [os.path.join(top, system) for system in data["systems"]]
    return content


def propose(wishes: Wishes, open_data: Callable[[Sequence[str]], list[System]]) -> Proposal:
    """Look at data and choose an input; `open_data` opens them by their paths.

    Raises
    ------
    DataError
        When data cannot be read, or have no energies, forces or virials.
    CommandError
        When no input could train on them.
    """
    systems = open_data(wishes.data)
    held_out = open_data(wishes.valid_data) if wishes.valid_data else []
    check_labels(systems)
    usable = [system for system in systems if system.labels & _PREFACTORS.keys()]
    if not usable:
        raise DataError("no system has energies, forces or virials: there is nothing to train on")
    warnings = [
        f"{system.name}: no energies, forces or virials; it is left out"
        for system in systems
        if system not in usable
    ]
    type_map = wishes.type_map or elements_of(usable)
    all_used = len(usable) == len(systems)
    usable = [system.with_types(type_map) for system in usable]
    held_out = [system.with_types(type_map) for system in held_out]
    warnings += suspicions([*usable, *held_out])
    warnings += unread_words([*usable, *held_out], wishes.reading.frame_parameters)
    if held_out:
        shares = [Share.for_training(system) for system in usable]
        shares += [Share.for_validation(system) for system in held_out]
    else:
        shares = split(usable, wishes.share)
    if not any(share.validation for share in shares):
        warnings.append(
            "no frame is held out, so that nothing measures errors on new structures (dp test, "
            "dp report): compute more frames, or give others with --valid-data"
        )
    data = _locate(wishes, type_map, shares, all_used=all_used)
    choices = list(_choices(wishes, data))
    content = _content(wishes, data, choices)
    normalize(content, "the proposed input")
    return Proposal(content=content, choices=choices, data=data, warnings=warnings)


def _locate(
    wishes: Wishes, type_map: Sequence[str], shares: list[Share], *, all_used: bool
) -> Data:
    """Decide which paths the input names, and which systems have to be written."""
    training = [system for share in shares if (system := share.training)]
    validation = [system for share in shares if (system := share.validation)]
    to_write = {}
    if wishes.valid_data and all_used:
        training_paths = list(wishes.data)
        validation_paths = list(wishes.valid_data)
    elif all(share.whole and _has_path(share.system) for share in shares):
        training_paths = [system.name for system in training]
        validation_paths = [system.name for system in validation]
    else:
        train_folder = wishes.folder / "train"
        valid_folder = wishes.folder / "valid"
        training_paths = [str(train_folder)] if training else []
        validation_paths = [str(valid_folder)] if validation else []
        if training:
            to_write[train_folder] = training
        if validation:
            to_write[valid_folder] = validation
    return Data(
        type_map=type_map,
        shares=shares,
        training_paths=training_paths,
        validation_paths=validation_paths,
        to_write=to_write,
    )


def _has_path(system: System) -> bool:
    """Whether an input can name a system alone: a folder, or a group of an HDF5 file."""
    return os.path.isfile(os.path.join(system.name, "type.raw")) or "#/" in system.name


def _choices(wishes: Wishes, data: Data) -> Iterator[Choice]:
    """Yield every setting that is not a default, with its reason."""
    yield Choice(
        "model/type_map",
        " ".join(data.type_map),
        "given" if wishes.type_map else "all types of the data, by atomic number",
    )
    kind = _descriptor_kind(wishes, data)
    advantage = "one network for all learns from more data"
    if kind == "se_e2_a":
        advantage = "a network for each is fast and accurate"
        if len(data.type_map) > _MANY_TYPES:
            advantage = "on molecules a network for each is more accurate (doc/molecules.md)"
    yield Choice(
        "model/descriptor/type",
        kind,
        "given" if wishes.descriptor else f"{_count(len(data.type_map), 'type')}: {advantage}",
    )
    yield Choice(
        "model/descriptor/rcut",
        f"{wishes.rcut:g} Å",
        "usual; --rcut changes it (longer: slower, and for long-ranged order)",
    )
    sel = _sel(kind, data)
    reason = "dp train counts neighbours"
    if sel != "auto":
        reason = (
            "DPA-1 divides by it: for molecules more than their neighbours (doc/learning-rate.md)"
        )
    yield Choice("model/descriptor/sel", str(sel), reason)
    atoms = isolated_energies([share.system for share in data.shares], wishes.rcut)
    if atoms:
        elements = [name for name in data.type_map if name in atoms]
        listed = ", ".join(f"{name} {np.mean(atoms[name]):.6g} eV" for name in elements)
        yield Choice(
            "model/fitting_net/atom_ener",
            "left out",
            f"free atoms ({listed}) train like other frames (why: doc/molecules.md)",
        )
    if wishes.reading.frame_parameters:
        yield Choice(
            "model/fitting_net/numb_fparam",
            str(len(wishes.reading.frame_parameters)),
            f"frame parameters {', '.join(wishes.reading.frame_parameters)}",
        )
    missing = ", ".join(name for name in _PREFACTORS if name not in data.labels)
    yield Choice(
        "loss",
        ", ".join(name for name in _PREFACTORS if name in data.labels),
        f"the labels of the data; they have no {missing}" if missing else "all labels of the data",
    )
    yield Choice(
        "optimizer/type",
        "HybridMuon",
        "its two rates have defaults that suit the run (doc/learning-rate.md)",
    )
    if _has_first_layer_on_adamw(wishes, data):
        yield Choice(
            "optimizer/adamw_patterns",
            _READS_DESCRIPTORS,
            "fewer dynamics of crystals and liquids blow up (doc/stability.md)",
        )
    yield Choice(
        "training/numb_steps",
        str(_steps(wishes, data)),
        "a first potential; 10 times as many lower the errors further",
    )
    natoms = max(share.system.natoms for share in data.shares)
    batch_size = _batch_size(data)
    reason = f"frames until a batch has 32 atoms (frames have up to {natoms})"
    if batch_size != "auto":
        reason = f"small frames of all systems share a batch of {_BATCH_ATOMS} atoms"
    yield Choice("training/…/batch_size", batch_size, reason)
    n_training = sum(share.train for share in data.shares)
    n_validation = sum(share.system.nframes for share in data.shares) - n_training
    written = bool(data.to_write)
    yield Choice(
        "training/training_data",
        f"{n_training} frame{'s' * (n_training != 1)}",
        _origin(data.training_paths, written=written),
    )
    reason = _reason_of_split(wishes, data.shares)
    if n_validation:
        reason += f" {_origin(data.validation_paths, written=written)}"
    yield Choice(
        "training/validation_data", f"{n_validation} frame{'s' * (n_validation != 1)}", reason
    )


def _sel(kind: str, data: Data) -> int | str:
    """Return the number of neighbours that a descriptor has room for."""
    return _SEL_OF_MOLECULES if kind == "dpa1" and _are_molecules(data) else "auto"


def _are_molecules(data: Data) -> bool:
    """Whether all structures are molecules of moderate size, or single atoms."""
    systems = [share.system for share in data.shares if share.system.natoms > 1]
    return all(system.natoms <= _ATOMS_OF_MOLECULES and not system.pbc for system in systems)


def _batch_size(data: Data) -> str:
    """Return the rule for batches: several systems smaller than a batch share one."""
    systems = [share.system for share in data.shares if share.train]
    small = [system for system in systems if 1 < system.natoms < _BATCH_ATOMS]
    return f"mix:{_BATCH_ATOMS}" if len(small) > 1 else "auto"


def _descriptor_kind(wishes: Wishes, data: Data) -> str:
    most = _MANY_TYPES_OF_MOLECULES if _are_molecules(data) else _MANY_TYPES
    return wishes.descriptor or ("se_e2_a" if len(data.type_map) <= most else "dpa1")


def _may_blow_up(wishes: Wishes, data: Data) -> bool:
    """Whether potentials of such data blow up where Muon has the layer that reads descriptors."""
    all_periodic = all(share.system.pbc for share in data.shares)
    return all_periodic and _descriptor_kind(wishes, data) == "se_e2_a"


def _steps(wishes: Wishes, data: Data) -> int:
    """Return the length of the run."""
    if wishes.steps is not None:
        return wishes.steps
    return _LONG_RUN if _may_blow_up(wishes, data) else _STEPS


def _has_first_layer_on_adamw(wishes: Wishes, data: Data) -> bool:
    """Whether AdamW updates the layer that reads descriptors."""
    return _may_blow_up(wishes, data) and _steps(wishes, data) >= _LONG_RUN


def _origin(paths: list[str], *, written: bool) -> str:
    place = paths[0] if len(paths) == 1 else _count(len(paths), "path")
    return f"written to {place}" if written else f"from {place}"


def _reason_of_split(wishes: Wishes, shares: list[Share]) -> str:
    if wishes.valid_data:
        return "given;"
    n_whole = sum(share.train == 0 for share in shares)
    n_cut = sum(not share.whole for share in shares)
    held_out = []
    if n_whole:
        held_out.append(_count(n_whole, "whole system"))
    if n_cut:
        held_out.append(f"the last frames of {_count(n_cut, 'system')}")
    if not held_out:
        return "too few frames to hold any out: give others with --valid-data"
    return f"{' and '.join(held_out)}, because neighbours in time are nearly copies;"


def _reading_keys(reading: Reading, *, trains: bool) -> dict[str, Any]:
    """Return the keys of a data section that say how files are read."""
    keys = {
        "format": reading.format,
        "config_weights": reading.config_weights if trains else None,
        "max_force": reading.max_force,
        "frame_parameters": list(reading.frame_parameters),
        "label_keys": {name: key for name, key in vars(reading.keys).items() if key},
        "keep_unconverged": reading.keep_unconverged,
    }
    return {key: value for key, value in keys.items() if value}


def _content(wishes: Wishes, data: Data, choices: list[Choice]) -> dict[str, Any]:
    """Return the input, with the reasons as comments."""
    if wishes.rcut <= 0.5:
        raise CommandError(
            "--rcut must be more than 0.5 Å, where the descriptor begins to fade; found "
            f"{wishes.rcut:g}"
        )

    def comment(prefix: str) -> dict[str, str]:
        """Return the reasons of all choices below a section, or of one key."""
        reasons = []
        for choice in choices:
            if choice.key.startswith(prefix):
                name = choice.key.removeprefix(prefix).strip("/")
                reasons.append(f"{name}: {choice.reason}" if name else choice.reason)
        return {"_comment": "; ".join(reasons)}

    def data_section(kind: str, paths: list[str]) -> dict[str, Any]:
        section: dict[str, Any] = {
            **comment(f"training/{kind}"),
            "systems": paths,
            "batch_size": _batch_size(data) if kind == "training_data" else "auto",
        }
        if not data.to_write:  # written systems are npy folders with their names
            section |= _reading_keys(wishes.reading, trains=kind == "training_data")
        return section

    kind = _descriptor_kind(wishes, data)
    descriptor = {
        **comment("model/descriptor"),
        "type": kind,
        "sel": _sel(kind, data),
        "rcut": wishes.rcut,
        "rcut_smth": 0.5,
        **_DESCRIPTORS[kind],
        "precision": "float32",
        "seed": 1,
    }
    fitting_net: dict[str, Any] = {
        **comment("model/fitting_net"),
        "neuron": [96, 96, 96],
        "precision": "float32",
        "seed": 1,
    }
    if wishes.reading.frame_parameters:
        fitting_net["numb_fparam"] = len(wishes.reading.frame_parameters)
    loss: dict[str, Any] = {**comment("loss"), "type": "ener"}
    for label, prefactor in _PREFACTORS.items():
        has_label = label in data.labels
        loss[f"start_pref_{prefactor.letter}"] = prefactor.start if has_label else 0
        loss[f"limit_pref_{prefactor.letter}"] = prefactor.limit if has_label else 0
    optimizer: dict[str, Any] = {"type": "HybridMuon"}
    if _has_first_layer_on_adamw(wishes, data):
        optimizer |= comment("optimizer/adamw_patterns")
        optimizer["adamw_patterns"] = [_READS_DESCRIPTORS]
        optimizer["adam_lr_ratio"] = 1.0  # with higher ratios more dynamics blow up
    training: dict[str, Any] = {"training_data": data_section("training_data", data.training_paths)}
    if data.validation_paths:
        validation_data = data_section("validation_data", data.validation_paths)
        training["validation_data"] = {**validation_data, "numb_btch": "sample"}
    steps = _steps(wishes, data)
    training |= {
        **comment("training/numb_steps"),
        "numb_steps": steps,
        "seed": 1,
        "disp_freq": max(1, min(100, steps // _MIN_CURVE_ROWS)),
        "save_freq": 1000,
    }
    return {
        "_comment": "written by dp init; keys that start with _ are comments",
        "model": {
            **comment("model/type_map"),
            "type_map": list(data.type_map),
            "descriptor": descriptor,
            "fitting_net": fitting_net,
        },
        "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-6},
        "loss": loss,
        "optimizer": optimizer,
        "training": training,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
