"""Translate older spellings of an input."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import PurePath
from typing import Any

from deepmd_muon.argcheck.errors import Problem
from deepmd_muon.argcheck.legacy_optimizer import translate_optimizer
from deepmd_muon.optim.words import RENAMED_SETTINGS
from deepmd_muon.setting import shown

_DATA_KEYS = (
    "systems",
    "set_prefix",
    "batch_size",
    "auto_prob",
    "auto_prob_style",
    "sys_probs",
    "sys_weights",
)
_WARMUP_KEYS = ("warmup_steps", "warmup_ratio", "warmup_start_factor")
_OPTIMIZER_KEYS = (
    "opt_type",
    "weight_decay",
    "momentum",
    "muon_momentum",
    "adam_beta1",
    "adam_beta2",
    "lr_adjust",
    "lr_adjust_coeff",
)
_TRANSLATED_KEYS = tuple(RENAMED_SETTINGS)

# Defaults of the version that had `muon_2d_only` and `min_2d_dim`, where they differ from today's.
# It ignored the layout: its scale, by lr_adjust 10, was sqrt(max(1, rows/columns)) of the weight as
# stored.
_FIRST_DEFAULTS: dict[str, Any] = {
    "scaling": "rectangular",
    "adam_lr_ratio": 0.1,
    "lr_adjust_coeff": 0.2,
    "magma_muon": False,
    "layout": "as_stored",
}

OLDER_SPELLINGS: tuple[tuple[str, str, str], ...] = (
    (", ".join(_DATA_KEYS), "in training", "The same keys in training/training_data."),
    ("save_dir", "in training", "The folder of save_ckpt."),
    ("numb_test", "in training", "Left out: it has had no effect since DeePMD-kit 2.0."),
    (", ".join(_WARMUP_KEYS), "in training", "The same keys in learning_rate."),
    (
        "opt_type",
        "in training",
        'optimizer/type. "HybridMuon" without a section optimizer takes the defaults of its first '
        "version, see below.",
    ),
    (", ".join(_OPTIMIZER_KEYS[1:]), "in training", "The same keys in optimizer."),
    (
        "muon_2d_only",
        "in training or in optimizer of type HybridMuon",
        f"optimizer/{RENAMED_SETTINGS['muon_2d_only']}.",
    ),
    (
        "min_2d_dim, muon_min_2d_dim",
        "in training or in optimizer of type HybridMuon",
        f"optimizer/{RENAMED_SETTINGS['min_2d_dim']}. With one of these three keys, settings that "
        "the section omits take the defaults of their version: lr_adjust 10.0, lr_adjust_coeff "
        '0.2, magma_muon false, muon_mode "2d", layout "as_stored".',
    ),
    (
        "lr_adjust",
        "in optimizer of type HybridMuon",
        'Above 0: scaling "rectangular" and adam_lr_ratio 1/lr_adjust, unless these are given. '
        "At or below 0: nothing, these are the defaults.",
    ),
    (
        "deepmd_kit_arithmetic",
        "in optimizer of type HybridMuon",
        'schedule "deepmd-kit", layout "as_stored" and, if it is omitted, lr_adjust_coeff 0.18.',
    ),
)
"""Spellings that `upgrade` accepts, and their translations: for the reference."""


@dataclasses.dataclass
class Upgrade:
    """An input on its way to today's spelling.

    Attributes
    ----------
    data
        The input; its own copy.
    notices
        One line for each translation, with the new spelling.
    problems
        Contradictions between old and new keys.
    origins
        Where a moved key stood in the file, by its new path.
    """

    data: dict[str, Any]
    notices: list[str] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)

    def section(self, name: str, *, create: bool = False) -> dict[str, Any] | None:
        """Return a section, None if it is not an object; with `create`, add an absent one."""
        if create:
            self.data.setdefault(name, {})
        section = self.data.get(name)
        return section if isinstance(section, dict) else None

    def move(self, source: str, key: str, target: str, name: str) -> None:
        """Move a key to another section; a key that is given there, too, is a contradiction."""
        value = self.data[source][key]
        into = self.data[target]
        old, new = f"{source}/{key}", f"{target}/{name}"
        if name in into:
            self.problems.append(
                Problem(old, f"is an older place of {new}, which is given too; keep only {new}")
            )
        else:
            into[name] = value
            self.origins[new] = old
            # The later translation of a key gives its only notice.
            if key not in _TRANSLATED_KEYS:
                self.notices.append(f"{old} is an older place; write {new}: {_json(value)}")
        del self.data[source][key]

    def origin(self, path: str) -> str:
        """Return where a path of the upgraded input stood in the file."""
        for new, old in self.origins.items():
            if path == new or path.startswith(new + "/"):
                return self.origin(old + path[len(new) :])
        return path


def upgrade(data: dict[str, Any]) -> Upgrade:
    """Translate a copy of the content of an input file to today's spelling."""
    upgraded = Upgrade(copy.deepcopy(data))
    training = upgraded.section("training")
    if training is not None:
        _drop_numb_test(upgraded, training)
        _join_save_dir(upgraded, training)
        _nest_training_data(upgraded, training)
        _move_warmup(upgraded, training)
        _move_optimizer(upgraded, training)
    _translate_hybrid_muon(upgraded)
    optimizer = upgraded.section("optimizer")
    if optimizer is not None and optimizer.get("type") in ("HybridMuon", "Muon"):
        upgraded.data["optimizer"], notices = translate_optimizer(optimizer)
        upgraded.notices += notices
    return upgraded


def _drop_numb_test(upgraded: Upgrade, training: dict[str, Any]) -> None:
    """Remove `numb_test`, which has had no effect since DeePMD-kit 2.0."""
    if "numb_test" in training:
        del training["numb_test"]
        upgraded.notices.append(
            "training/numb_test has no effect and is left out; validation takes "
            "training/validation_data/batch_size and numb_btch"
        )


def _join_save_dir(upgraded: Upgrade, training: dict[str, Any]) -> None:
    """Make deepmd-kit's `save_dir` the folder of `save_ckpt`."""
    if "save_dir" not in training:
        return
    folder = training.pop("save_dir")
    prefix = training.get("save_ckpt", "model.ckpt")
    if folder is None or not isinstance(prefix, str):
        return  # the check judges save_ckpt
    if not isinstance(folder, str):
        words = f"must be the name of a folder; found {shown(folder)}"
        upgraded.problems.append(Problem("training/save_dir", words))
        return
    training["save_ckpt"] = str(PurePath(folder, prefix))
    upgraded.origins["training/save_ckpt"] = "training/save_dir"
    upgraded.notices.append(
        f"training/save_dir is the folder of save_ckpt: {_json(training['save_ckpt'])}"
    )


def _nest_training_data(upgraded: Upgrade, training: dict[str, Any]) -> None:
    """Move the data keys of DeePMD-kit 1.x inputs from `training` itself to `training_data`."""
    data_keys = [key for key in _DATA_KEYS if key in training]
    # Only the old layout had `systems` there. Without it, the check reports the other keys as
    # misplaced.
    if "systems" not in data_keys:
        return
    if "training_data" in training:
        upgraded.problems += [
            Problem(
                f"training/{key}",
                "is an older place; training/training_data is given too, keep only that",
            )
            for key in data_keys
        ]
        for key in data_keys:
            del training[key]
        return
    training["training_data"] = {key: training.pop(key) for key in data_keys}
    for key in data_keys:
        upgraded.origins[f"training/training_data/{key}"] = f"training/{key}"
        if key != "set_prefix":
            value = _json(training["training_data"][key])
            upgraded.notices.append(
                f"training/{key} is an older place; write training/training_data/{key}: {value}"
            )


def _move_warmup(upgraded: Upgrade, training: dict[str, Any]) -> None:
    """Move the warm-up from `training` to `learning_rate`."""
    if upgraded.section("learning_rate") is None:
        return
    for key in _WARMUP_KEYS:
        if key in training:
            upgraded.move("training", key, "learning_rate", key)


def _move_optimizer(upgraded: Upgrade, training: dict[str, Any]) -> None:
    """Move the optimizer's keys of DeePMD-kit 3.1 inputs from `training` to `optimizer`."""
    keys = [key for key in (*_OPTIMIZER_KEYS, *_TRANSLATED_KEYS) if key in training]
    if not keys or upgraded.section("optimizer", create=True) is None:
        return
    for key in keys:
        upgraded.move("training", key, "optimizer", "type" if key == "opt_type" else key)


def _translate_hybrid_muon(upgraded: Upgrade) -> None:
    """Translate `muon_2d_only` and `min_2d_dim`, and fill in the defaults of the first version.

    That version had these keys, and it alone had the optimizer's keys in `training`.
    """
    optimizer = upgraded.section("optimizer")
    if optimizer is None:
        return
    legacy = [key for key in _TRANSLATED_KEYS if key in optimizer]
    if not legacy and optimizer.get("type") == "HybridMuon":
        origins = [upgraded.origins.get(f"optimizer/{key}") for key in optimizer]
        legacy = ["training/opt_type"] if all(origins) else []
    if not legacy:
        return
    if optimizer.get("type") != "HybridMuon":
        upgraded.problems += [
            Problem(
                upgraded.origin(f"optimizer/{key}"),
                'belongs to optimizer/type "HybridMuon"; set it or remove this',
            )
            for key in legacy
        ]
        for key in legacy:
            del optimizer[key]
        return
    given_mode = "muon_mode" in optimizer
    _translate_2d_only(upgraded, optimizer)
    _translate_min_dim(upgraded, optimizer)
    filled = {key: value for key, value in _FIRST_DEFAULTS.items() if key not in optimizer}
    if "lr_adjust" in optimizer:  # it determines these two
        filled = {k: v for k, v in filled.items() if k not in ("scaling", "adam_lr_ratio")}
    # `muon_2d_only` was true by default, and every key of that version keeps its meaning.
    if not given_mode and "muon_2d_only" not in legacy:
        filled["muon_mode"] = "2d"
    optimizer.update(filled)
    if filled:
        words = ", ".join(f"{key}: {_json(value)}" for key, value in filled.items())
        upgraded.notices.append(
            f"optimizer has older keys ({', '.join(legacy)}) and takes the defaults of their "
            f"version for settings it omits; write {words}"
        )


def _translate_2d_only(upgraded: Upgrade, optimizer: dict[str, Any]) -> None:
    """Turn `muon_2d_only` into `muon_mode`."""
    if "muon_2d_only" not in optimizer:
        return
    value = optimizer.pop("muon_2d_only")
    old = upgraded.origin("optimizer/muon_2d_only")
    if "muon_mode" in optimizer:
        upgraded.problems.append(
            Problem(
                old,
                "is the older form of optimizer/muon_mode, which is given too; keep only muon_mode",
            )
        )
    elif not isinstance(value, bool):
        upgraded.problems.append(
            Problem(
                old,
                f'must be true or false; found {shown(value)} (it is now muon_mode: "2d" or '
                '"flat")',
            )
        )
    else:
        optimizer["muon_mode"] = "2d" if value else "flat"
        upgraded.origins["optimizer/muon_mode"] = old
        upgraded.notices.append(
            f"{old}: {_json(value)} is an older form; write optimizer/muon_mode: "
            f'"{optimizer["muon_mode"]}"'
        )


def _translate_min_dim(upgraded: Upgrade, optimizer: dict[str, Any]) -> None:
    """Turn `min_2d_dim` into `min_matrix_dim`."""
    old_keys = [key for key in ("min_2d_dim", "muon_min_2d_dim") if key in optimizer]
    for index, key in enumerate(old_keys):
        value = optimizer.pop(key)
        old = upgraded.origin(f"optimizer/{key}")
        if index or "min_matrix_dim" in optimizer:
            first_key = "min_2d_dim" if index else "min_matrix_dim"
            upgraded.problems.append(
                Problem(
                    old,
                    f"is an older form of min_matrix_dim; {first_key} is given too, keep only "
                    "min_matrix_dim",
                )
            )
            continue
        optimizer["min_matrix_dim"] = value
        upgraded.origins["optimizer/min_matrix_dim"] = old
        upgraded.notices.append(
            f"{old}: {_json(value)} is an older form; write optimizer/min_matrix_dim: "
            f"{_json(value)}. Smaller matrices still take the Adam route, but with today's Adam: "
            "the old one clipped and scaled their update"
        )


def _json(value: Any) -> str:
    """Return a value as it would stand in a JSON file, for a notice."""
    return (
        f'"{value}"'
        if isinstance(value, str)
        else shown(value).removeprefix("the list ").replace("'", '"')
    )
