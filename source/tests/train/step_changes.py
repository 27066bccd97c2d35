"""Inputs in which one setting differs, for every setting of the sections that a training step may depend on.

A new setting takes part by itself. If no other value follows from its declaration, the tests fail until `EXAMPLES`, or
another table here, has one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
from loss_changes import LOSS_EXAMPLES
from settings_changes import changes_of
from write_systems import make_arrays, write_npy

from deepmd_muon.argcheck import load
from deepmd_muon.argcheck.training import TrainingSettings

STEPS = 6
EMA = {"enable_ema": True}
TENSORBOARD = {"tensorboard": True, "disp_freq": 1}
# A value of None leaves the key out.
TRAINING = {
    "training_data": [],  # see `TRAINING_DATA`
    "validation_data": [],
    "capture": [],  # what the tests compare
    "stat_file": [{"stat_file": "statistics.hdf5"}],
    "stat_file_mode": [],  # "read" needs a file of an earlier run
    "numb_steps": [{"numb_steps": 4}],
    "numb_epoch": [{"numb_epoch": 2.0, "numb_steps": None}],
    "seed": [{"seed": 4}],
    "disp_file": [{"disp_file": "curve.out"}],
    "jsonl_file": [{"jsonl_file": "curve.jsonl"}],
    "save_ckpt": [{"save_ckpt": "other"}],
    "gradient_max_norm": [{"gradient_max_norm": 0.1}],
    "adam_gradient_max_norm": [{"adam_gradient_max_norm": 0.1}],
    "ema_decay": [{"ema_decay": 0.6, **EMA}],
    "ema_tail": [{"ema_tail": 0.5, **EMA}],
    "tensorboard": [TENSORBOARD],
    "tensorboard_log_dir": [{"tensorboard_log_dir": "events", **TENSORBOARD}],
    "tensorboard_freq": [{"tensorboard_freq": 2, **TENSORBOARD}],
    "wandb_project": [{"wandb_project": "copper", "wandb": True}],
    "profiling_file": [{"profiling_file": "trace.json", "profiling": True}],
    "data_parallel_replicate_degree": [{"data_parallel_replicate_degree": 2, "zero_stage": 2}],
}
OF_BRANCHES = {
    "data_dict": [],
    "model_prob": [{"model_prob": {"hot": 1, "cold": 2}}],
    "num_epoch_dict": [
        {"num_epoch_dict": {"hot": 1.0, "cold": 1.0}, "model_prob": None, "numb_steps": None}
    ],
    "export_branch": [{"export_branch": "hot"}],
}
SYSTEMS = {
    "systems": [],  # the tests' own
    "rglob_patterns": [],  # which folders are systems
    "label_keys": [],  # names of labels in files of other programs
    "format": [],  # of files of other programs
    "frame_parameters": [],  # for models with parameters
    "config_weights": [],  # for frames of named kinds
    "max_force": [{"max_force": 3.0}],  # leaves 7 of 12 frames
    "batch_size": [{"batch_size": size} for size in (1, "auto:20", "mixed:2", "mix:20")],
    "auto_prob": [{"auto_prob": "prob_uniform"}],
    "sys_probs": [{"sys_probs": [0.3, 0.7]}],
}
VALIDATION_DATA = {**SYSTEMS, "numb_btch": [{"numb_btch": 2}, {"numb_btch": "all"}]}
LEARNING_RATE = {
    "stop_lr": [{"stop_lr": 1e-4}],
    "stop_lr_ratio": [{"stop_lr_ratio": 0.3, "stop_lr": None}],
    "warmup_steps": [{"warmup_steps": 2}],
    "warmup_ratio": [{"warmup_ratio": 0.5}],
    "warmup_start_factor": [{"warmup_start_factor": 0.5, "warmup_steps": 3}],
    "decay_rate": [{"decay_rate": 0.8}],
}
VALIDATING = {
    name: [{name: value, "full_validation": True}]
    for name, value in {
        "validation_freq": 2,
        "full_val_start": 0.0,
        "validation_metric": "F:RMSE",
        "save_best": False,
        "save_best_dir": "best",
        "max_best_ckpt": 2,
        "full_val_file": "validation.log",
        "early_stop_patience": 1,
    }.items()
}


def write_labelled(root: Path) -> list[str]:
    """Write two small systems with all labels but coefficients of atoms; return their paths."""
    paths = []
    labels = ("energy", "force", "virial", "atom_ener", "atom_pref")
    for number, natoms in enumerate((8, 6)):
        arrays = make_arrays(6, natoms, seed=number, labels=labels)
        arrays["atom_pref"] = np.abs(arrays["atom_pref"])
        paths.append(write_npy(root / f"system{number}", [0] * natoms, [arrays], ["Cu"]))
    return paths


def content_with(content, path, change):
    """Return an input with some keys of a section, which the path names, changed."""
    changed = copy.deepcopy(content)
    section = changed
    for name in path:
        section = section.setdefault(name, {})
    for key, value in change.items():
        if value is None:
            section.pop(key, None)
        else:
            section[key] = list(value) if isinstance(value, tuple) else value
    return changed


def settings_of(content):
    """Return the settings of an input."""
    Path("input.json").write_text(json.dumps(content))
    return load("input.json").settings


def inputs_with_changes(content, root):
    """Return inputs of short runs by the setting that differs; `content` is the small input of these tests."""
    content = copy.deepcopy(content)
    data = {"systems": write_labelled(root), "batch_size": 2}
    content["training"] |= {
        "training_data": data,
        "validation_data": dict(data),
        "numb_steps": STEPS,
        "save_freq": 3,
    }
    content["loss"] |= {"start_pref_v": 0.1, "limit_pref_v": 1.0}
    settings = settings_of(content)
    sections = {
        ("training",): (settings.training, TRAINING),
        ("training", "training_data"): (settings.training.training_data, SYSTEMS),
        ("training", "validation_data"): (settings.training.validation_data, VALIDATION_DATA),
        ("validating",): (settings.validating, VALIDATING),
        ("loss",): (settings.loss, LOSS_EXAMPLES),
    }
    inputs = {"nothing": content}
    for path, (section, examples) in sections.items():
        for name, change in changes_of(section, examples).items():
            inputs[f"{'/'.join(path)}: {name}"] = content_with(content, path, change)
    for kind in ("exp", "cosine", "wsd"):
        start = {"type": kind, "start_lr": 1e-3, "stop_lr": 1e-5}
        base = {**content, "learning_rate": start}
        section = settings_of(base).learning_rate
        examples = {name: LEARNING_RATE[name] for name in LEARNING_RATE if hasattr(section, name)}
        for name, change in {"nothing": {}, **changes_of(section, examples)}.items():
            inputs[f"learning_rate: {kind}, {name}"] = content_with(
                base, ("learning_rate",), change
            )
    return inputs


def inputs_of_branches(content):
    """Return inputs of two branches by the setting that differs, for settings that only such inputs have."""
    section = settings_of(content).training
    of_one_model = {field.name for field in dataclasses.fields(TrainingSettings)}
    names = {field.name for field in dataclasses.fields(section)}
    examples = {name: change for name, change in (TRAINING | OF_BRANCHES).items() if name in names}
    return {
        f"training: {name}": content_with(content, ("training",), change)
        for name, change in changes_of(section, examples).items()
        if not change.keys() <= of_one_model
    }
