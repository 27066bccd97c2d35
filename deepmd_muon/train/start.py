"""The command `dp train` without its command line.

All ranks go through `run` together. Rank 0 alone reads and writes what only one may.
`Ranks.run_on_rank0` hands its results or errors to the others; `if ranks.first` hands them nothing.

1. The outputs are checked and locked. Only then the checkpoint of `--restart` is known
   (`continued_by`), and no other run can write a newer one.
2. Checkpoints are read (`read_sources`). They supply settings that the input omits.
3. `_prepare`: data, `sel`, models, statistics and weights, the trainer.
4. A restart takes the optimizer's state and the step from its checkpoint.
5. Files of earlier runs that this one would overwrite are set aside, and training begins.

A *branch* is a model with its data; only multi-task inputs have several. A *source* is the saved
model that a branch starts from. The *way* of a source is the option that names its checkpoint. A
*sample* makes batches of a branch's frames on a GPU before the first step, to measure them.

`log.info` shows on rank 0 alone, `log.warning` on every rank (`set_up_logging`).

`run_input` becomes complete in four places: from checkpoints (`take_from_checkpoint`), by opening
the data (`open_training_systems`), by counting neighbours (`resolve_sel`), and by the length of
descriptors (`suit_scales`). Each returns another input.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from deepmd_muon.argcheck import Input, dump
from deepmd_muon.argcheck.differences import unlike_deepmd_kit
from deepmd_muon.checkpoint_file.file import checkpoint_path, understood
from deepmd_muon.data import DataLoader, NeighborCache, NeighborStatistics, StatFile
from deepmd_muon.data.sampling.sampler import new_seed
from deepmd_muon.data.system import longest_spin
from deepmd_muon.files import make_folder_of
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches, branches_of
from deepmd_muon.train.batches.device_sample import DeviceSample, sample_on
from deepmd_muon.train.branches import RunBranch, build_of, make_branches
from deepmd_muon.train.checkpoint.content import check_remaining_steps
from deepmd_muon.train.checkpoint.continued_state import state_of
from deepmd_muon.train.checkpoint.ownership import AUTOMATIC, RunFiles, continued_by
from deepmd_muon.train.checkpoint.source import Source, Way, read_sources
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.omitted_settings import (
    check_sel,
    counting_of,
    resolve_sel,
    suit_scales,
    take_from_checkpoint,
)
from deepmd_muon.train.process.abort import Moment, explained
from deepmd_muon.train.process.allocator import keep_freed_memory
from deepmd_muon.train.process.warm_up import warm_up
from deepmd_muon.train.ranks.ranks import Ranks, joined
from deepmd_muon.train.report import set_up_logging
from deepmd_muon.train.report.trackers import require_tensorboard, require_wandb
from deepmd_muon.train.statistics import set_model_statistics, settle_energy_bias
from deepmd_muon.train.systems import (
    Systems,
    check_same_run,
    make_loaders,
    open_training_systems,
    seed_of,
    warn_of_shared_frames,
)
from deepmd_muon.train.trainer import Trainer

log = logging.getLogger(__name__)

# Neighbour lists of all branches, training and validation, take at most this many bytes in each
# process.
_CACHE_BYTES = 2 << 30


def run(  # noqa: PLR0913 - the options of dp train
    run_input: Input,
    *,
    output: str = "out.json",
    restart: str | None = None,
    init_model: str | None = None,
    finetune: str | None = None,
    model_branch: str | None = None,
    skip_neighbor_stat: bool = False,
    force_load: bool = False,
    use_pretrain_script: bool = False,
    make_data: Callable[[], None] | None = None,
    log_level: int | str = "INFO",
    log_path: str | None = None,
    console_level: int | str | None = None,
    begun: float | None = None,
) -> int:
    """Train a model as an input file says.

    Parameters
    ----------
    run_input
        The checked input, see `load`.
    output
        Where the normalised input goes.
    restart
        Checkpoint to continue, step and optimizer state included. "auto" or "latest" is the newest
        of `training/save_ckpt`; without one the run starts afresh.
    init_model
        Checkpoint to take the weights of; the run begins at step 0.
    finetune
        The same, and the energy bias is fitted to the training data first, unless the fitting net
        is new.
    model_branch
        Branch of a multi-task checkpoint that a run of one model takes; see `read_sources`.
    skip_neighbor_stat
        Believe `sel` without counting neighbours.
    force_load
        Load what fits of the checkpoint and start the other parameters anew.
    use_pretrain_script
        Take section `model` from the checkpoint; with `finetune`, its descriptor and fitting net.
    make_data
        Writes data that the input names and that do not exist yet; rank 0 calls it before data are
        opened.
    log_level, log_path, console_level
        See `set_up_logging`.
    begun
        `time.monotonic()` when the command began, for the log; now by default.

    Returns
    -------
    int
        Exit status: 0, or 128 plus a signal's number when the run was ended by it.

    Raises
    ------
    TrainingError
        When the run cannot start or go on.

    Notes
    -----
    Where the checkpoint has another `type_map`, rows of known types move, in the optimizer's state
    too, and new types start anew; descriptors that have networks for types, as se_e2_a, refuse it.

    Under torchrun or srun all processes train one model together, as `training/zero_stage` says.
    """
    begun = time.monotonic() if begun is None else begun
    training = run_input.settings.training
    # The checkpoint of --restart as far as it is known. `lock_files` finds that of "auto", and the
    # newest one instead of the link of `save_ckpt`, which a killed run may not have renewed.
    restart_file = None if restart in AUTOMATIC else restart
    with joined(training.rank_timeout) as ranks, contextlib.ExitStack() as stack:
        files = RunFiles(run_input, output, log_path)
        checkpoint_file = restart_file or init_model or finetune
        ranks.run_on_rank0("looking at its outputs", lambda: files.check(checkpoint_file))

        def last_good_checkpoint() -> Path | None:
            """Return the checkpoint that an error message advises to continue from."""
            # Not that of --finetune. `restart_file` changes once files are locked.
            checkpoint = init_model or restart_file
            return checkpoint_path(checkpoint) if checkpoint else None

        stack.enter_context(explained(lambda: Moment("preparing"), newest=last_good_checkpoint))
        set_up_logging(
            log_level,
            log_path,
            rank=ranks.rank if ranks.size > 1 else None,
            console_level=console_level,
        )

        def lock_files() -> str | None:
            """Lock the run's files; return the checkpoint that it continues."""
            stack.enter_context(files.held())
            continued_file = continued_by(restart, training.save_ckpt)
            if restart in AUTOMATIC:  # the check above did not know it
                files.check(continued_file)
            return continued_file

        restart_file = ranks.run_on_rank0("locking its files", lock_files)
        ways: dict[Way, str | None] = {
            "restart": restart_file,
            "init_model": init_model,
            "finetune": finetune,
        }
        sources = read_sources(run_input, ways, model_branch)
        # All sources come from one file, so any of them has its content.
        restart_source = next(iter(sources.values())) if restart_file else None
        if restart_source is not None and training.numb_steps is not None:
            with understood(restart_source.path):
                # The trainer checks it again: only it knows the number of steps of epochs.
                check_remaining_steps(
                    restart_source.content, training.numb_steps, restart_source.path
                )
        run_input = take_from_checkpoint(
            run_input, sources, use_pretrain_script=use_pretrain_script, force_load=force_load
        )
        # Not `run_on_rank0`: the others need no result. An error ends rank 0; the others notice at
        # the next wait.
        if ranks.first:
            _log_remarks(run_input, sources)
            _check_outputs(run_input, output)
        if make_data is not None:
            ranks.run_on_rank0("drawing structures to replay", make_data)

        trainer = _prepare(
            run_input,
            sources,
            ranks,
            output,
            count_neighbors=not skip_neighbor_stat,
            force_load=force_load,
        )
        if restart_source is not None:
            content = state_of(sources, trainer.model, trainer.optimizer)
            with understood(restart_source.path):
                trainer.restart(content, restart_source.path)
        ranks.run_on_rank0(
            "keeping other files",
            lambda: files.keep(restart_source, trainer.step, trainer.validation.keep_earlier),
        )
        return trainer.run(begun)


def _log_remarks(run_input: Input, sources: Mapping[str, Source]) -> None:
    """Log remarks on the input, differences from deepmd-kit, and what fine-tuning forgets."""
    for notice in (*run_input.notices, *run_input.idle):
        log.warning("%s", notice)
    if run_input.small_steps and not any(source.way == "restart" for source in sources.values()):
        log.warning("%s", run_input.small_steps)
    # HybridMuon's scales. `suit_scales` logs those that are not kept, because it may lower them.
    scales_notices = [run_input.scales.notice] if run_input.scales and run_input.scales.kept else []
    for remark in (*run_input.remarks, *scales_notices):
        log.info("%s", remark)
    for name, branch in run_input.branches.items():
        finetune = name in sources and sources[name].way == "finetune"
        if different := unlike_deepmd_kit(branch, finetune=finetune):
            log.info("deepmd-kit 3.2.0 runs this input otherwise: %s", "; ".join(different))
    source = next(iter(sources.values()), None)
    if (
        source
        and source.way == "finetune"
        and not source.new_fitting
        and len(run_input.branches) == 1
    ):
        log.warning(
            "fine-tuning forgets what %s knows beyond these data: errors on other structures grow; "
            "--replay DATA or --replay pseudo keeps most of it (doc/fine-tuning.md)",
            source.path,
        )


def _check_outputs(run_input: Input, output: str) -> None:
    """Find out before the long work begins that a report or another output could not be written."""
    make_folder_of(Path(output))
    for branch in run_input.branches.values():
        if branch.data.stat_file:
            StatFile(branch.data.stat_file)  # refuses a folder
    if run_input.settings.training.tensorboard:
        require_tensorboard()
    if run_input.settings.training.wandb:
        require_wandb()


def _prepare(
    run_input: Input,
    sources: dict[str, Source],
    ranks: Ranks,
    output: str,
    *,
    count_neighbors: bool,
    force_load: bool,
) -> Trainer:
    """Open the data, build the models with their statistics or weights, and make the trainer.

    With `count_neighbors`, `sel` is compared with the data. With `force_load`, checkpoints need not
    match the models.
    """
    warm_up(ranks.device)
    if ranks.device.type == "cpu":
        keep_freed_memory()

    # Data, and the settings that depend on them.
    run_input, systems = open_training_systems(run_input)
    check_same_run(run_input, systems, ranks)
    if ranks.first:
        for branch_systems in systems.values():
            warn_of_shared_frames(branch_systems.training, branch_systems.validation)
    # Replaces every `sel` that is not a number. The statistics are those of branches with counted
    # numbers and a descriptor section of their own; `_compare_sel` counts for all others.
    run_input, neighbor_stats = ranks.run_on_rank0(
        "counting neighbours",
        lambda: resolve_sel(
            run_input, systems, sources, count=count_neighbors, device=ranks.device
        ),
    )
    # After `sel` has numbers: sections are compared with those of checkpoints.
    for name, source in sources.items():
        source.check(run_input.branches[name].model, insist=force_load)
    # Now, so that a run that fails below leaves it; again below if `suit_scales` changes it.
    if ranks.first:
        dump(run_input.normalized, output)

    # Models, without statistics or weights, and loaders, which need the models' cut-offs.
    model = build_of(run_input)
    _require_tables(model, sources)
    _require_trainable(model)
    seed = run_input.settings.training.seed
    if seed is None:
        seed = ranks.run_on_rank0("drawing a seed", new_seed)
    models = branches_of(model)
    if any(branch_model.fits_own_statistics for branch_model in models.values()):
        # Some of these models, deepmd-kit's, draw numbers in a step, and each rank other ones.
        torch.manual_seed(seed if ranks.first else seed_of(seed, f"rank {ranks.rank}"))
    _reach_spins(model, systems, ranks)  # before the caches, which take the widened cut-offs
    data = make_loaders(run_input, systems, _neighbor_caches(run_input, model), seed, ranks)
    loaders = {name: branch_data.training for name, branch_data in data.items()}

    # Measured in the data before the first step: neighbours, statistics, energy biases.
    needs_statistics = force_load or not _all_have_statistics(run_input, sources)
    # Before `_compare_sel`: counting and statistics read the same samples.
    samples = _samples_on_device(loaders, ranks)
    if count_neighbors:
        fits_energies = any(source.way == "finetune" for source in sources.values())
        neighbor_stats |= _compare_sel(
            run_input,
            {name: models[name] for name in models if name not in neighbor_stats},
            loaders,
            samples,
            ranks,
            measured=needs_statistics or fits_energies,
        )
    _log_size(model, ranks)
    branches = make_branches(
        run_input,
        model,
        data,
        distances={name: stats.min_distance for name, stats in neighbor_stats.items()},
        continued={name: source.branch for name, source in sources.items()},
    )
    _set_weights(
        model,
        branches,
        sources,
        samples,
        ranks,
        needs_statistics=needs_statistics,
        force_load=force_load,
    )

    # HybridMuon's scales depend on the length of descriptors, which statistics and weights decide.
    suited_input = suit_scales(run_input, branches, ranks, samples)
    if ranks.first and suited_input != run_input:
        dump(suited_input.normalized, output)
    return Trainer(suited_input, model, branches, seed, ranks)


def _require_tables(model: EnergyModel | Branches, sources: Mapping[str, Source]) -> None:
    """Refuse a model whose table of `use_srtab` cannot be read and is in no checkpoint."""
    for name, branch_model in branches_of(model).items():
        has_table = name in sources and sources[name].has_table
        if branch_model.missing_file and not has_table:
            raise TrainingError(branch_model.missing_file)


def _require_trainable(model: EnergyModel | Branches) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise TrainingError(
            "nothing is trainable: set trainable to true in model/descriptor or model/fitting_net"
        )


def _reach_spins(
    model: EnergyModel | Branches, systems: Mapping[str, Systems], ranks: Ranks
) -> None:
    """Widen neighbour lists for the virtual atoms that the spins of the data displace."""
    for name, branch_model in branches_of(model).items():
        if branch_model.lists_depend_on_spins:
            longest = ranks.run_on_rank0("reading spins", partial(longest_spin, systems[name].all))
            branch_model.reach_spins(longest)


def _neighbor_caches(run_input: Input, model: EnergyModel | Branches) -> dict[str, NeighborCache]:
    """Return the neighbour lists of each branch; all of them keep at most `_CACHE_BYTES`."""
    size = _CACHE_BYTES // len(run_input.branches)
    return {
        name: NeighborCache.of(branch_model.neighbors, branch_model.ntypes, size)
        for name, branch_model in branches_of(model).items()
    }


def _all_have_statistics(run_input: Input, sources: Mapping[str, Source]) -> bool:
    """Return whether the checkpoints hold statistics of all types of all branches."""
    return all(
        name in sources and sources[name].has_statistics(branch.model.type_map)
        for name, branch in run_input.branches.items()
    )


def _samples_on_device(loaders: Mapping[str, DataLoader], ranks: Ranks) -> dict[str, DeviceSample]:
    """Return the samples of branches whose batches a GPU can make; on a CPU none."""
    samples = {}
    for name, loader in loaders.items():
        sample = sample_on(ranks.device, loader.systems, loader.cache)
        if sample is not None:
            samples[name] = sample
    return samples


def _compare_sel(
    run_input: Input,
    models: Mapping[str, EnergyModel],
    loaders: Mapping[str, DataLoader],
    samples: Mapping[str, DeviceSample],
    ranks: Ranks,
    *,
    measured: bool,
) -> dict[str, NeighborStatistics]:
    """Compare the `sel` of these models with the training data; return their statistics.

    With `measured`, statistics or energy biases are computed next, and the host also lists the
    neighbours of the frames that these read.
    """
    neighbor_stats = {}
    for name, model in models.items():
        loader = loaders[name]
        count = counting_of(run_input, model, loader, samples.get(name), measured=measured)
        model_path = run_input.branches[name].model_path
        neighbor_stats[name] = ranks.run_on_rank0(
            "counting neighbours", partial(check_sel, model, loader, count, model_path)
        )
    return neighbor_stats


def _log_size(model: EnergyModel | Branches, ranks: Ranks) -> None:
    log.info(
        "model: %d trainable weights of %d on %s",
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() for p in model.parameters()),
        ranks.device if ranks.size == 1 else f"{ranks.size} × {ranks.device.type}",
    )


def _set_weights(
    model: EnergyModel | Branches,
    branches: Mapping[str, RunBranch],
    sources: dict[str, Source],
    samples: Mapping[str, DeviceSample],
    ranks: Ranks,
    *,
    needs_statistics: bool,
    force_load: bool,
) -> None:
    """Give the models their statistics and weights, and move them to the device.

    The order matters: statistics first, weights of checkpoints over them, then the energy biases
    that are fitted to these weights, and at the end rank 0's values on all ranks. Nothing changes
    weights between here and the first step: `suit_scales` and the average (`Ema`) read them.

    With `needs_statistics` statistics come from `stat_file` or are computed: on the device without
    a checkpoint, where branches with a sample take its frames. With a checkpoint the model stays on
    the CPU until its weights are loaded, and statistics are computed there.
    """
    if not sources:
        model.to(ranks.device)
    if needs_statistics:
        usable_samples = {} if sources else samples
        ranks.run_on_rank0(
            "computing statistics", lambda: set_model_statistics(branches, usable_samples)
        )
    # Branches may share parts now that were not shared in the checkpoints. Then the first branch
    # wins, so it is loaded last.
    for name in reversed(sources):
        sources[name].load_into(branches[name].model, force=force_load)
    model.to(ranks.device)
    for name, source in sources.items():
        settle = partial(
            settle_energy_bias, branches[name].model, source, branches[name].data.training
        )
        ranks.run_on_rank0("fitting the energy bias", settle)
    ranks.copy_from_rank0(model)
