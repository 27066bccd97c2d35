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
from typing import Any

from deepmd_muon.argcheck import normalize
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.data import DataError, System
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.opening import check_labels, elements_of
from deepmd_muon.data.sampling.splitting import Share, split
from deepmd_muon.data.writing import formula_of, write_npy
from deepmd_muon.files import make_folder_of, whole_file

# se_e2_a has a network for every type of neighbour; beyond so many types one for all of them learns
# from more data.
_MANY_TYPES = 4
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
_PREFACTORS = {"energy": ("e", 0.02, 1), "force": ("f", 1000, 1), "virial": ("v", 0.02, 1)}
_SHOWN = 20  # systems listed
_ROWS = 40  # of the learning curve, at least


@dataclass(frozen=True)
class Wishes:
    """The command line.

    Attributes
    ----------
    data, valid_data
        Paths of all data, or of training and validation data.
    share
        Share of the frames that validation takes where `valid_data` is empty.
    descriptor
        Kind of the descriptor, None for the number of types to decide.
    rcut
        Cut-off radius [Å].
    steps
        Length of the run.
    type_map
        Types; empty for those of the data.
    label_keys, keep_unconverged
        As in `training_data` of an input.
    folder
        Where systems are written that a split cuts.
    """

    data: tuple[str, ...]
    valid_data: tuple[str, ...]
    share: float
    descriptor: str | None
    rcut: float
    steps: int
    type_map: tuple[str, ...]
    label_keys: dict[str, str]
    keep_unconverged: bool
    folder: Path


@dataclass(frozen=True)
class Choice:
    """One setting: its key in the input, its value in words, and the reason."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Proposal:
    """An input and its grounds: choices with reasons, frames of every system, doubts about the data.

    `to_write` has the systems to write by folder; it is empty where the input names the data as
    they are.
    """

    content: dict[str, Any]
    choices: list[Choice]
    shares: list[Share]
    warnings: list[str]
    to_write: dict[Path, list[System]]

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
            content = _with_seed(
                self.content, seed, os.path.relpath(".", output.parent) if seed > 1 else "."
            )
            texts.append(_encoded(json.dumps(content, indent=2, ensure_ascii=False) + "\n"))
        written: list[Path] = []
        try:
            for folder, systems in self.to_write.items():
                write_npy(systems, folder)
                written.append(folder)
            for text, output in zip(texts, outputs, strict=True):
                make_folder_of(output)
                with whole_file(output, new=True) as file:
                    file.write(text)
        except BaseException:
            for folder in written:
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # the other part of the split
                    folder.parent.rmdir()
            raise

    def report(self) -> str:
        """Return what was found and chosen as tables."""
        rows = [("system", "formula", "atoms", "cell", "labels", "training", "validation")]
        for share in self.shares[:_SHOWN]:
            system = share.system
            labels = ", ".join(sorted(system.labels)) + ("" if system.uniform_labels else " (some)")
            kind = (
                system.name,
                formula_of(system),
                str(system.natoms),
                "periodic" if system.pbc else "none",
                labels,
            )
            rows.append((*kind, str(share.train), str(system.nframes - share.train)))
        more = len(self.shares) - _SHOWN
        lines = [*_table(rows), *([f"and {more} more systems"] if more > 0 else []), ""]
        lines += _table(
            [("key", "value", "reason"), *((c.key, c.value, c.reason) for c in self.choices)]
        )
        return "\n".join([*lines, "", *(f"warning: {warning}" for warning in self.warnings)])


def _encoded(text: str) -> bytes:
    """Return a text in UTF-8; bytes of paths that are none stand in it as half surrogate pairs."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        wrong = os.fsencode(error.object[error.start : error.end])
        raise CommandError(
            f"a path of the data is no UTF-8 ({wrong!r}): an input cannot name it; rename it"
        ) from error


def _with_seed(content: dict[str, Any], seed: int, top: str) -> dict[str, Any]:
    """Return an input of other first weights and another order of the data.

    From its folder `top` leads here.
    """
    content = copy.deepcopy(content)
    for section in (
        content["model"]["descriptor"],
        content["model"]["fitting_net"],
        content["training"],
    ):
        section["seed"] = seed
    for kind in ("training_data", "validation_data"):
        if kind in content["training"]:
            data = content["training"][kind]
            data["systems"] = [
                system if top == "." else os.path.join(top, system) for system in data["systems"]
            ]
    return content


def propose(wishes: Wishes, open_data: Callable[[Sequence[str]], list[System]]) -> Proposal:
    """Look at data, which `open_data` opens by their paths, and choose.

    Raises
    ------
    DataError
        When data cannot be read, or have no energies, forces or virials.
    CommandError
        When no input could train on them.
    """
    found, held_out = (
        open_data(wishes.data),
        open_data(wishes.valid_data) if wishes.valid_data else [],
    )
    check_labels(found)
    usable = [system for system in found if system.labels & _PREFACTORS.keys()]
    if not usable:
        raise DataError("no system has energies, forces or virials: there is nothing to train on")
    warnings = [
        f"{s.name}: no energies, forces or virials; it is left out"
        for s in found
        if s not in usable
    ]
    type_map = wishes.type_map or elements_of(usable)
    usable, held_out = (
        [system.with_types(type_map) for system in part] for part in (usable, held_out)
    )
    warnings += suspicions([*usable, *held_out])
    if held_out:
        shares = [*(Share(s, s.nframes) for s in usable), *(Share(s, 0) for s in held_out)]
    else:
        shares = split(usable, wishes.share)
    places, to_write = _places(wishes, shares, all_used=len(usable) == len(found))
    choices = list(_choices(wishes, type_map, shares, places, written=bool(to_write)))
    content = _content(wishes, type_map, shares, places, choices, written=bool(to_write))
    normalize(content, "the proposed input")
    return Proposal(content, choices, shares, warnings, to_write)


def _places(
    wishes: Wishes, shares: list[Share], *, all_used: bool
) -> tuple[dict[str, list[str]], dict[Path, list[System]]]:
    """Return the paths of training and validation data, and the systems to write there."""
    if wishes.valid_data and all_used:
        return {"training": list(wishes.data), "validation": list(wishes.valid_data)}, {}
    kinds = {
        "training": [system for share in shares if (system := share.training)],
        "validation": [system for share in shares if (system := share.validation)],
    }
    if all(share.whole and _has_a_path(share.system) for share in shares):
        return {kind: [system.name for system in systems] for kind, systems in kinds.items()}, {}
    folders = {"training": wishes.folder / "train", "validation": wishes.folder / "valid"}
    to_write = {folders[kind]: systems for kind, systems in kinds.items() if systems}
    return {
        kind: [str(folders[kind])] if systems else [] for kind, systems in kinds.items()
    }, to_write


def _has_a_path(system: System) -> bool:
    """Whether an input can name a system alone: a folder, or a group of an HDF5 file."""
    return os.path.isfile(os.path.join(system.name, "type.raw")) or "#/" in system.name


def _choices(
    wishes: Wishes,
    type_map: Sequence[str],
    shares: list[Share],
    places: dict[str, list[str]],
    *,
    written: bool,
) -> Iterator[Choice]:
    """Yield every setting that is not a default, with its reason."""
    yield Choice(
        "model/type_map",
        " ".join(type_map),
        "given" if wishes.type_map else "all types of the data, by atomic number",
    )
    kind, rcut = _descriptor_kind(wishes, type_map), f"{wishes.rcut:g} Å"
    one = f"{_count(len(type_map), 'type')}: " + (
        "a network for each is fast and accurate"
        if kind == "se_e2_a"
        else "one network for all learns from more data"
    )
    yield Choice("model/descriptor/type", kind, "given" if wishes.descriptor else one)
    yield Choice(
        "model/descriptor/rcut",
        rcut,
        "usual; --rcut changes it (longer: slower, and for long-ranged order)",
    )
    yield Choice("model/descriptor/sel", "auto", "dp train counts neighbours")
    labels = _labels(shares)
    terms = ", ".join(name for name in _PREFACTORS if name in labels)
    missing = ", ".join(name for name in _PREFACTORS if name not in labels)
    yield Choice(
        "loss",
        terms,
        f"the labels of the data; they have no {missing}" if missing else "all labels of the data",
    )
    yield Choice(
        "optimizer/type",
        "HybridMuon",
        "its two rates have defaults that suit the run (doc/learning-rate.md)",
    )
    yield Choice(
        "training/numb_steps",
        str(wishes.steps),
        "a first potential; 10 times as many lower the errors further",
    )
    atoms = max(share.system.natoms for share in shares)
    yield Choice(
        "training/…/batch_size",
        "auto",
        f"frames until a batch has 32 atoms (frames have up to {atoms})",
    )
    train, valid = (
        sum(counts)
        for counts in zip(*((s.train, s.system.nframes - s.train) for s in shares), strict=True)
    )
    yield Choice(
        "training/training_data", f"{train} frames", _where(places["training"], written=written)
    )
    reason = _reason_of_split(wishes, shares) + (
        f" {_where(places['validation'], written=written)}" if valid else ""
    )
    yield Choice("training/validation_data", f"{valid} frames", reason)


def _descriptor_kind(wishes: Wishes, type_map: Sequence[str]) -> str:
    return wishes.descriptor or ("se_e2_a" if len(type_map) <= _MANY_TYPES else "dpa1")


def _labels(shares: list[Share]) -> set[str]:
    """Labels of training data that the loss can compare with."""
    return {
        label
        for share in shares
        if share.train
        for label in share.system.labels & _PREFACTORS.keys()
    }


def _where(paths: list[str], *, written: bool) -> str:
    shown = paths[0] if len(paths) == 1 else _count(len(paths), "path")
    return f"written to {shown}" if written else f"from {shown}"


def _reason_of_split(wishes: Wishes, shares: list[Share]) -> str:
    if wishes.valid_data:
        return "given;"
    whole = sum(share.train == 0 for share in shares)
    blocks = sum(not share.whole for share in shares)
    parts = [f"{_count(whole, 'whole system')}"] * bool(whole)
    parts += [f"the last frames of {_count(blocks, 'system')}"] * bool(blocks)
    if not parts:
        return "too few frames to hold any out: give others with --valid-data"
    return f"{' and '.join(parts)}, because neighbours in time are nearly copies;"


def _content(
    wishes: Wishes,
    type_map: Sequence[str],
    shares: list[Share],
    places: dict[str, list[str]],
    choices: list[Choice],
    *,
    written: bool,
) -> dict[str, Any]:
    """Return the input, with the reasons as comments."""

    def comment(prefix: str) -> dict[str, str]:
        chosen = [c for c in choices if c.key.startswith(prefix)]
        names = (c.key.removeprefix(prefix).strip("/") for c in chosen)
        text = "; ".join(
            f"{name}: {c.reason}" if name else c.reason
            for name, c in zip(names, chosen, strict=True)
        )
        return {"_comment": text}

    def data(kind: str) -> dict[str, Any]:
        section: dict[str, Any] = {
            **comment(f"training/{kind}_data"),
            "systems": places[kind],
            "batch_size": "auto",
        }
        if not written:  # written systems have the names of npy folders
            section |= {"label_keys": wishes.label_keys} if wishes.label_keys else {}
            section |= {"keep_unconverged": True} if wishes.keep_unconverged else {}
        return section

    kind, labels = _descriptor_kind(wishes, type_map), _labels(shares)
    if wishes.rcut <= 0.5:
        raise CommandError(
            "--rcut must be more than 0.5 Å, where the descriptor begins to fade; found "
            f"{wishes.rcut:g}"
        )
    descriptor = {
        "type": kind,
        "sel": "auto",
        "rcut": wishes.rcut,
        "rcut_smth": 0.5,
        **_DESCRIPTORS[kind],
    }
    loss: dict[str, Any] = {**comment("loss"), "type": "ener"}
    for label, (term, start, limit) in _PREFACTORS.items():
        there = label in labels
        loss |= {
            f"start_pref_{term}": start if there else 0,
            f"limit_pref_{term}": limit if there else 0,
        }
    training: dict[str, Any] = {"training_data": data("training")}
    if places["validation"]:
        training["validation_data"] = {**data("validation"), "numb_btch": "sample"}
    training |= {**comment("training/numb_steps"), "numb_steps": wishes.steps, "seed": 1}
    training |= {"disp_freq": max(1, min(100, wishes.steps // _ROWS)), "save_freq": 1000}
    return {
        "_comment": "written by dp init; keys that start with _ are comments",
        "model": {
            **comment("model/type_map"),
            "type_map": list(type_map),
            "descriptor": {
                **comment("model/descriptor"),
                **descriptor,
                "precision": "float32",
                "seed": 1,
            },
            "fitting_net": {"neuron": [96, 96, 96], "precision": "float32", "seed": 1},
        },
        "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-6},
        "loss": loss,
        "optimizer": {"type": "HybridMuon"},
        "training": training,
    }


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
