"""The command `dp train` without its command line."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.argcheck import Input, dump, load, normalize
from deepmd_muon.data import NeighborCache, StatFile
from deepmd_muon.files import make_folder_of
from deepmd_muon.model import EnergyModel, build_model
from deepmd_muon.model.checkpoint_file import understood
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE, from_deepmd_kit
from deepmd_muon.model.settings import model_settings
from deepmd_muon.train.checkpoint.changes import check_model_section
from deepmd_muon.train.checkpoint.ownership import held, keep_earlier, remove_leftovers
from deepmd_muon.train.checkpoint.reading import read
from deepmd_muon.train.endings import Moment, explained
from deepmd_muon.train.errors import CheckpointError, TrainingError
from deepmd_muon.train.parallel import Ranks, joined
from deepmd_muon.train.report import set_up_logging
from deepmd_muon.train.report.tensorboard import require_tensorboard
from deepmd_muon.train.setup import (
    CACHE_BYTES,
    check_same_data,
    check_sel,
    make_loaders,
    new_seed,
    open_training_systems,
    resolve_sel,
    set_model_statistics,
    with_descriptor,
)
from deepmd_muon.train.trainer import Trainer

log = logging.getLogger(__name__)

# Values of --restart that stand for the newest checkpoint, if there is one.
AUTOMATIC = ("auto", "latest")


@dataclasses.dataclass(frozen=True)
class Source:
    """The checkpoint a run starts from, taken apart.

    Attributes
    ----------
    path
        The file.
    content
        Everything in it.
    model_section
        Section `model` of the input it was trained with.
    weights
        The model's state, under our names.
    """

    path: Path
    content: Mapping[str, Any]
    model_section: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, path: str, leave: Collection[str] = ()) -> Source:
        """Read a checkpoint of ours or of deepmd-kit; `leave` as in `read_checkpoint`."""
        content = read(path, leave)
        with understood(path):
            section, weights = from_deepmd_kit(content["model"])
        return cls(Path(path), content, section, weights)


def run(
    input_path: str,
    *,
    output: str = "out.json",
    restart: str | None = None,
    init_model: str | None = None,
    skip_neighbor_stat: bool = False,
    force_load: bool = False,
    use_pretrain_script: bool = False,
    log_level: int | str = "INFO",
    log_path: str | None = None,
) -> int:
    """Train a model as an input file says.

    Parameters
    ----------
    input_path
        JSON or YAML.
    output
        Where the normalised input goes.
    restart
        Checkpoint to continue, step and optimizer state included. "auto" or "latest" is the newest of
        `training/save_ckpt`; without one the run starts afresh.
    init_model
        Checkpoint to take the weights of; the run begins at step 0.
    skip_neighbor_stat
        Believe `sel` without counting neighbours.
    force_load
        Load what fits of the checkpoint and start the other parameters anew.
    use_pretrain_script
        Take section `model` from the checkpoint of `init_model`.
    log_level, log_path
        See `set_up_logging`.

    Returns
    -------
    int
        Exit status: 0, or 128 plus a signal's number when the run was ended by it.

    Raises
    ------
    InputError
        When the input is wrong.
    TrainingError
        When the run cannot start or go on.

    Notes
    -----
    Under torchrun or srun all processes train one model together, as `training/zero_stage` says.
    """
    given = load(input_path)
    training = given.settings.training
    with joined(training.rank_timeout) as ranks, contextlib.ExitStack() as stack:
        found = init_model or (None if restart in AUTOMATIC else restart)
        stack.enter_context(explained(lambda: Moment("preparing"), lambda: Path(found) if found else None))
        set_up_logging(log_level, log_path, rank=ranks.rank if ranks.size > 1 else None)
        ranks.from_first("locking its files", lambda: stack.enter_context(held(training, input_path)))
        ranks.from_first("removing what killed runs left", lambda: remove_leftovers(training))
        if restart in AUTOMATIC:
            restart = ranks.from_first("looking for a checkpoint", lambda: _newest(given.settings.training.save_ckpt))
        found = restart or init_model
        # Of a directory, several ranks read optimizer state and average later, each its part.
        leave = ("optimizer", "ema") if init_model or ranks.size > 1 else ()
        source = Source.read(found, leave) if found else None
        if ranks.first:  # the others learn of an error as of any that ends a rank
            for notice in given.notices:
                log.warning("%s", notice)
            _check_reports(given, output)
        given = _complete_input(given, source, use_pretrain_script=use_pretrain_script)
        trainer = _prepare(given, source, ranks, output, count=not skip_neighbor_stat, force_load=force_load)
        if restart and source:
            with understood(source.path):
                trainer.restart(source.content, source.path)
        else:
            ranks.from_first("keeping the files of an earlier run", lambda: keep_earlier(training))
        return trainer.run()


def _newest(save_ckpt: str) -> str | None:
    """Return the newest checkpoint of a prefix, file or directory, or None; its links say which that is."""
    links = [Path(f"{save_ckpt}{suffix}") for suffix in (".dcp", ".pt")]
    found = [link for link in links if link.exists()]
    if not found:
        log.info("there is no %s: starting afresh", " or ".join(map(str, links)))
        return None

    def step(link: Path) -> int:
        name = re.search(r"-(\d+)$", link.resolve().stem)
        return int(name[1]) if name else 0

    return str(max(found, key=step))  # of the same step, the directory


def _check_reports(given: Input, output: str) -> None:
    """Find out before the long work begins that a report or the normalised input could not be written."""
    make_folder_of(Path(output))
    if given.settings.training.tensorboard:
        require_tensorboard()


def _complete_input(given: Input, source: Source | None, *, use_pretrain_script: bool) -> Input:
    """Take the model section of a checkpoint if asked to, and refuse a `stat_file` that cannot be written."""
    if source and use_pretrain_script:
        given = dataclasses.replace(
            normalize({**given.normalized, "model": dict(source.model_section)}), notices=given.notices
        )
    if given.settings.training.stat_file:
        StatFile(given.settings.training.stat_file)  # refuses a folder before the long work begins
    return given


def _prepare(
    given: Input, source: Source | None, ranks: Ranks, output: str, *, count: bool, force_load: bool
) -> Trainer:
    """Open the data, build the model with its statistics or weights, and make the trainer."""
    train, valid = open_training_systems(given.settings.model, given.settings.training)
    check_same_data(train, ranks)
    if source and given.settings.model.descriptor.needs_counts:
        saved = model_settings(source.model_section).descriptor
        given = with_descriptor(given, given.settings.model.descriptor.with_counts_of(saved))
        log.info("sel of model/descriptor becomes %s, as in %s", list(saved.neighbors().sel), source.path)
    given, statistics = ranks.from_first("counting neighbours", lambda: resolve_sel(given, train, count=count))
    if source:
        check_model_section(model_settings(source.model_section), given.settings.model, source.path, insist=force_load)
    if ranks.first:
        dump(given.normalized, output)

    model = build_model(given.normalized["model"])
    cache = NeighborCache.of(model.neighbors, model.ntypes, CACHE_BYTES)
    if statistics is None and count:
        statistics = ranks.from_first("counting neighbours", lambda: check_sel(model, train, cache))
    if not any(p.requires_grad for p in model.parameters()):
        raise TrainingError("nothing is trainable: set trainable to true in model/descriptor or model/fitting_net")
    log.info(
        "model: %d trainable weights of %d on %s",
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() for p in model.parameters()),
        ranks.device if ranks.size == 1 else f"{ranks.size} × {ranks.device.type}",
    )
    seed = given.settings.training.seed
    seed = ranks.from_first("drawing a seed", new_seed) if seed is None else seed
    data = make_loaders(train, valid, given.settings.training, cache, seed, ranks)
    if source is None or force_load:
        section, training = given.normalized["model"], given.settings.training
        ranks.from_first("computing statistics", lambda: set_model_statistics(model, data, section, training))
    if source is not None:
        load_weights(model, source, force=force_load)
    shortest = statistics.min_distance if statistics else UNKNOWN_DISTANCE
    model = model.to(ranks.device)
    ranks.copy_from_first(model)
    return Trainer(given, model, data, shortest, ranks)


def load_weights(model: EnergyModel, source: Source, *, force: bool) -> None:
    """Load a checkpoint's weights and statistics into the model.

    Parameters
    ----------
    model
        The model of the present input.
    source
        The checkpoint.
    force
        Take what fits and say what does not, instead of stopping.

    Raises
    ------
    CheckpointError
        Listing every tensor that is missing, unknown or of another shape.
    """
    present = model.state_dict()
    problems = [f"{name}: not in the checkpoint" for name in present if name not in source.weights]
    problems += [f"{name}: not in the model of this input" for name in source.weights if name not in present]
    problems += [
        f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {tuple(present[name].shape)} here"
        for name, tensor in source.weights.items()
        if name in present and tensor.shape != present[name].shape
    ]
    if problems and not force:
        saved = model_settings(source.model_section).descriptor.neighbors().sel
        if saved != model.sel:
            problems.insert(0, f"model/descriptor/sel: {list(saved)} in the checkpoint, {list(model.sel)} here")
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"the weights of {source.path} do not fit the model of this input:\n{listed}\n"
            "Use the model section the checkpoint was trained with (--use-pretrain-script), "
            "or --force-load to take what fits."
        )
    for problem in problems:
        log.warning("--force-load: %s", problem)
    fitting = {
        name: tensor
        for name, tensor in source.weights.items()
        if name in present and tensor.shape == present[name].shape
    }
    model.load_state_dict(fitting, strict=False)
