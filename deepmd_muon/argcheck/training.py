"""Section `training`: data, length, outputs of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from deepmd_muon.label_keys import LabelKeys, Reading
from deepmd_muon.section import Foreign, Rule, Section, section
from deepmd_muon.setting import Needs, setting, switched_on

_SYSTEMS = (
    "Systems of data: folders, HDF5 files or groups in them (file.hdf5#/group), folders in which "
    "to look for systems, LMDB databases (data.lmdb), files that ASE reads (extended XYZ), or "
    "patterns of such paths (data/**/fcc*). A single string stands for a list of one."
)
# Names of files: "", "." and "/" have no last part that a number or an ending could be added to.
_FILE_NAME: dict[str, Any] = {"pattern": r"[\s\S]*[^./\s][\s\S]*", "forms": "the name of a file"}
_DECIMAL = r"\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?"

# ----- training_data and validation_data ---------------------------------------------------------

# Functions of rules get the values of their keys and return the problem with the first, or None.


def _some_systems(systems: tuple[str, ...]) -> str | None:
    return None if systems else "must name at least one system; found an empty list"


def _relative_patterns(rglob_patterns: tuple[str, ...] | None) -> str | None:
    if rglob_patterns is None:
        return None
    wrong = [
        pattern for pattern in rglob_patterns if not pattern.strip("./") or pattern.startswith("/")
    ]
    if wrong or not rglob_patterns:
        return (
            "must be patterns of folders below systems, e.g. 'fcc*'; found "
            f"{wrong or 'an empty list'}"
        )
    return None


def _probabilities(sys_probs: tuple[float, ...] | None, systems: tuple[str, ...]) -> str | None:
    if sys_probs is None:
        return None
    # A folder may hold several systems, so there may be more probabilities than names, never fewer.
    if len(sys_probs) < len(systems):
        return (
            f"must have one probability for each of the {len(systems)} systems; found "
            f"{len(sys_probs)}"
        )
    total = math.fsum(probability for probability in sys_probs if probability >= 0)
    has_negative = any(probability < 0 for probability in sys_probs)  # they share the remainder
    if total > 1 + 1e-8 or (not has_negative and not math.isclose(total, 1.0, abs_tol=1e-8)):
        return (
            f"must sum to {'at most ' if has_negative else ''}1 over the entries that are not negative; "
            f"found {total:g}"
        )
    return None


def _auto_prob_blocks(auto_prob: str, sys_probs: tuple[float, ...] | None) -> str | None:
    if sys_probs is not None and auto_prob != "prob_sys_size":
        return "excludes sys_probs; keep one of them"
    for block in auto_prob.split(";")[1:]:
        start, end, _ = block.split(":")
        if int(start) >= int(end):
            return f"must have blocks start:end:weight with start < end; found {block!r}"
    return None


@dataclasses.dataclass(frozen=True)
class TrainingDataSettings(Section):
    """Systems that training draws its batches from."""

    systems: tuple[str, ...] = setting(lone=True, doc=_SYSTEMS)
    rglob_patterns: tuple[str, ...] | None = setting(
        None,
        doc=(
            "Patterns such as 'fcc*', matched as by Python's Path.rglob. With patterns, systems "
            "lists folders; every folder at any depth below them that matches a pattern and has a "
            "type.raw is a system."
        ),
    )
    format: str | None = setting(
        None,
        nonempty=True,
        doc=(
            "Format of all systems, by its name in ASE (vasp-out) or dpdata (cp2k/output). By "
            "default the content and the name of each file tell."
        ),
    )
    label_keys: LabelKeys = section(LabelKeys(), doc="Names of the labels in files that ASE reads.")
    keep_unconverged: bool = setting(
        False,
        doc=(
            "Keep frames whose electronic loop did not converge, in files that ASE or dpdata "
            "read (VASP, Gaussian, ORCA). By default they are left out with a warning."
        ),
    )
    frame_parameters: tuple[str, ...] = setting(
        (),
        pattern=r"[A-Za-z_][\w-]*",
        forms="a name such as 'charge'",
        doc=(
            "Frame parameters that the model reads, by name, in this order: ['charge', 'spin']. "
            "Each is a word in the headers of extended XYZ, or a file (charge.npy) of each set. "
            "They take the place of fparam.npy, and numb_fparam may be left out."
        ),
    )
    config_weights: Mapping[str, float] | None = setting(
        None,
        minimum=0.0,
        doc=(
            "Weights of frames in the loss by their config_type, a word in the headers of extended "
            "XYZ. 'Default' holds for types that are not named (1 if it is left out). Frames of "
            "weight 0 are left out. A frame's own weight (weight.npy, or weight or config_weight "
            "in its header) multiplies it."
        ),
    )
    max_force: float | None = setting(
        None,
        above=0.0,
        doc="Leave out frames with a larger force on an atom [eV/Å]; the log names them.",
    )
    min_pair_dist: float = setting(
        0.0,
        minimum=0.0,
        doc=(
            "Leave out frames with two atoms nearer than this [Å]; the log names them. Models with "
            "an analytical potential at short distances take bridging_r_inner."
        ),
    )
    batch_size: int | str | tuple[int, ...] = setting(
        "auto",
        minimum=1,
        nonempty=True,
        pattern=r"auto(:[1-9]\d*)?|(max|filter|mixed|mix):[1-9]\d*",
        forms=(
            '"auto", "auto:N", "max:N", "filter:N", "mixed:N", "mix:N", a whole number or one for '
            "each system"
        ),
        doc=(
            "Frames in a batch. 'auto:N' is the smallest size with at least N atoms in a batch "
            "('auto': 32); 'max:N' the largest with at most N atoms, but at least one frame; "
            "'filter:N' the same without the systems of more than N atoms; 'mixed:N' draws N "
            "frames from all systems together; 'mix:N' fills batches with frames of similar sizes "
            "from all systems, up to N atoms with padding."
        ),
    )
    auto_prob: str = setting(
        "prob_sys_size",
        alias=("auto_prob_style",),
        pattern=rf"prob_uniform|prob_sys_size(;\d+:\d+:({_DECIMAL}))*",
        forms='"prob_uniform", "prob_sys_size" or "prob_sys_size;start:end:weight;…"',
        doc=(
            "Probability of a system: 'prob_uniform' is the same for all, 'prob_sys_size' is "
            "proportional to the number of its batches. With ';start:end:weight' blocks, the "
            "systems start … end−1 share the weight in proportion to their batches."
        ),
    )
    sys_probs: tuple[float, ...] | None = setting(
        None,
        alias=("sys_weights",),
        doc=(
            "Probability of each system. Systems with a negative entry share the remaining "
            "probability in proportion to their batches."
        ),
    )

    @property
    def reading(self) -> Reading:
        """How the systems are read."""
        return Reading(
            keys=self.label_keys,
            format=self.format,
            keep_unconverged=self.keep_unconverged,
            config_weights=self.config_weights or {},
            max_force=self.max_force,
            min_pair_dist=self.min_pair_dist,
            frame_parameters=self.frame_parameters,
        )

    rules = (
        Rule(("systems",), _some_systems),
        Rule(("rglob_patterns",), _relative_patterns),
        Rule(("sys_probs", "systems"), _probabilities),
        Rule(("auto_prob", "sys_probs"), _auto_prob_blocks),
    )
    hints: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("fmt", "file_format", "data_format"), "format"),
        **dict.fromkeys(("config_type_weights", "weights"), "config_weights"),
        **dict.fromkeys(("fparam_names", "fparam_keys", "charge", "spin"), "frame_parameters"),
        **dict.fromkeys(("force_cap", "max_forces", "force_limit", "force_threshold"), "max_force"),
    }
    foreign: ClassVar[dict[str, Foreign]] = {
        "set_prefix": Foreign("sets of frames with another prefix than 'set'", ("set",)),
    }


@dataclasses.dataclass(frozen=True)
class ValidationDataSettings(TrainingDataSettings):
    """Systems that the errors shown during training are measured on."""

    numb_btch: int | str = setting(
        1,
        minimum=1,
        maximum=1_000_000,
        alias=("numb_batch",),
        pattern="all|sample",
        forms='a whole number, "all" or "sample"',
        doc=(
            "Batches of all processes together over which the validation errors are averaged. "
            "'all' takes every frame once. 'sample' takes the same frames each time, spread evenly "
            "over the systems: at most a third of disp_freq frames, but at least 10."
        ),
    )


# ----- training ----------------------------------------------------------------------------------


def _one_length(numb_steps: int | None, numb_epoch: float | None) -> str | None:
    if numb_steps is None and numb_epoch is None:
        return "is missing; give numb_steps or numb_epoch"
    if numb_steps is not None and numb_epoch is not None:
        return f"excludes numb_epoch; found {numb_steps} and {numb_epoch:g}, keep one of them"
    return None


def _only_sharded(data_parallel_replicate_degree: int, zero_stage: int) -> str | None:
    if data_parallel_replicate_degree > 1 and zero_stage < 2:
        return (
            f"needs zero_stage 2 or 3; found {data_parallel_replicate_degree} with zero_stage "
            f"{zero_stage}"
        )
    return None


def _a_file_to_read(stat_file_mode: str, stat_file: str | None) -> str | None:
    if stat_file_mode == "read" and stat_file is None:
        return "needs stat_file, the file to read"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchDataSettings(Section):
    """Data of one model."""

    training_data: TrainingDataSettings = section(
        doc="Systems that training draws its batches from."
    )
    validation_data: ValidationDataSettings | None = section(
        None,
        doc="Systems that the errors shown during training are measured on; none when left out.",
    )
    stat_file: str | None = setting(
        None,
        doc=(
            "HDF5 file that keeps the statistics of the data for later runs; it must not be a "
            "folder."
        ),
    )
    stat_file_mode: str = setting(
        "update",
        choices=("update", "read"),
        doc=(
            "'update' adds missing statistics to stat_file; 'read' never writes it, and refuses a "
            "file that lacks those of this model and these data."
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (Rule(("stat_file_mode", "stat_file"), _a_file_to_read),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Section):
    """Length and outputs of a run that trains one model or several."""

    numb_steps: int | None = setting(
        None,
        minimum=0,
        alias=("stop_batch", "num_step", "num_steps", "numb_step"),
        doc=(
            "Number of steps, one batch each (or accumulate_grad_batches). Excludes a number of "
            "epochs."
        ),
    )
    accumulate_grad_batches: int = setting(
        1,
        minimum=1,
        alias=("gradient_accumulation_steps",),
        doc=(
            "Batches of each process in one step, for effective batches that do not fit into "
            "memory: the step uses the mean of their gradients. Learning rate, average, numb_steps "
            "and all frequencies count steps; the errors shown cover all batches of the step."
        ),
    )
    balance_batches: bool = setting(
        False,
        doc=(
            "Order batches so that the processes of a step get batches of similar cost, and none "
            "waits long for the others. The cost counts atoms, neighbours and, for DPA-3, angles "
            "of a system's first frame. The order does not depend on the number of processes; it "
            "differs from the order without this key."
        ),
    )
    seed: int | None = setting(
        None, minimum=0, doc="Seed of the order of the data; random by default."
    )
    disp_file: str = setting(
        "lcurve.out",
        **_FILE_NAME,
        doc=(
            "File of the learning curve. An error is nan, here and in the log, where no frame of "
            "the batch has its label."
        ),
    )
    disp_freq: int = setting(1000, minimum=1, doc="Steps between two rows of the learning curve.")
    jsonl_file: str | None = setting(
        None,
        **_FILE_NAME,
        doc=(
            "File with a line of JSON for every row of the learning curve: step, time [s], lr and "
            "all errors. By default none is written."
        ),
    )
    disp_training: bool = setting(True, doc="Write the learning curve and show its rows.")
    time_training: bool = setting(True, doc="Show the time of the steps.")
    disp_avg: bool = setting(
        False,
        needs=(switched_on("disp_training"),),
        doc=(
            "Show training errors averaged over the steps since the last row instead of those of "
            "its batch."
        ),
    )
    save_freq: int = setting(1000, minimum=1, doc="Steps between two checkpoints.")
    save_ckpt: str = setting("model.ckpt", **_FILE_NAME, doc="Prefix of the checkpoint files.")
    max_ckpt_keep: int = setting(
        5, minimum=1, doc="Number of checkpoints that are kept; older ones are deleted."
    )
    gradient_max_norm: float = setting(
        0.0,
        minimum=0.0,
        doc=(
            "Largest norm of the gradient; a longer gradient is scaled down to it. 0 turns this "
            "off."
        ),
    )
    adam_gradient_max_norm: float = setting(
        0.0,
        minimum=0.0,
        doc=(
            "Largest norm of the gradients on HybridMuon's Adam and AdamW routes; longer ones are "
            "scaled down to it. The Muon route needs no bound, because the size of its update does "
            "not depend on that of the gradient. With another optimizer, all gradients count. 0 "
            "turns this off."
        ),
    )
    enable_ema: bool = setting(
        False, doc="Keep an exponential average of the parameters and save it, too."
    )
    ema_decay: float = setting(
        0.999,
        minimum=0.0,
        below=1.0,
        needs=(
            switched_on("enable_ema"),
            Needs(("ema_tail",), lambda tail: tail == 0, "ema_tail 0"),
        ),
        doc="Decay d of the average: average ← d·average + (1 − d)·parameter.",
    )
    ema_tail: float = setting(
        0.0,
        minimum=0.0,
        maximum=1.0,
        needs=(switched_on("enable_ema"),),
        doc=(
            "Fraction of the run, at its end, over which the average weights all parameters "
            "equally. Before that, the average equals the current parameters. 0 selects the "
            "exponential average with ema_decay."
        ),
    )
    tensorboard: bool = setting(False, doc="Write TensorBoard events.")
    tensorboard_log_dir: str = setting(
        "log", needs=(switched_on("tensorboard"),), doc="Folder of the TensorBoard events."
    )
    tensorboard_freq: int = setting(
        1,
        minimum=1,
        needs=(switched_on("tensorboard"),),
        doc="Steps between two TensorBoard events.",
    )
    wandb: bool = setting(False, doc="Send the rows of the learning curve to Weights & Biases.")
    wandb_project: str = setting(
        "deepmd_muon", needs=(switched_on("wandb"),), doc="Project of Weights & Biases."
    )
    profiling: bool = setting(False, doc="Write a trace of the run for chrome://tracing.")
    profiling_file: str = setting(
        "timeline.json", **_FILE_NAME, needs=(switched_on("profiling"),), doc="File of the trace."
    )
    zero_stage: int = setting(
        0,
        choices=(0, 1, 2, 3),
        doc=(
            "Objects that the processes of torchrun shard: 0 none, 1 the optimizer's state, 2 also "
            "gradients, and parameters between steps, 3 parameters also between forward and "
            "backward pass. A single process holds everything at any stage."
        ),
    )
    data_parallel_replicate_degree: int = setting(
        1,
        minimum=1,
        doc=(
            "Hybrid sharding (HSDP) with zero_stage 2 or 3: the processes form this many groups of "
            "equal size. Each group, of neighbouring processes, shards the whole model. A single "
            "process ignores it."
        ),
    )
    capture: str = setting(
        "auto",
        choices=("auto", "on", "off"),
        doc=(
            "Record the training step in a CUDA graph for each shape of batches and replay it: the "
            "host then launches one graph instead of hundreds of kernels. 'auto' records on GPUs, "
            "with several processes at zero_stage 0 and 1. 'on' is an error where steps cannot be "
            "recorded. 'off' never records. If recording fails, the host launches kernels one by "
            "one, and the log says why."
        ),
    )
    enable_tf32: bool = setting(
        False,
        doc=(
            "Multiply float32 matrices of prediction and gradient in TF32 (11 bits of mantissa) in "
            "training steps on a GPU. Does not affect networks in float64, the optimizer, "
            "validation and inference."
        ),
    )
    enable_compile: bool = setting(
        False,
        doc=(
            "Fuse the operations of models that deepmd-kit's modules compute (DPA-4, DPA-2 …) by "
            "torch's compiler in training steps on a GPU. It takes minutes for each of the first "
            "8 shapes of batches; compiled kernels are kept on disk for the next run. "
            "`use_compile` of DPA-4 does the same. Models of this package have fused kernels "
            "anyway."
        ),
    )
    recompute: bool = setting(
        False,
        doc=(
            "Keep only the inputs of dpa3's layers and of dpa1's attention layers in a training "
            "step, and recompute the rest for forces and gradient. This saves memory and takes "
            "more time."
        ),
    )
    interpolate_embedding: bool = setting(
        True,
        doc=(
            "Interpolate the embedding nets of se_e2_a in training steps instead of evaluating "
            "them at every edge. The run does so if batches are large enough to profit, and if the "
            "estimated error of a feature is below 1e-9 (float32: 1e-6) of the largest; it repeats "
            "this check as weights change. Validation, tests and inference always evaluate the "
            "networks themselves."
        ),
    )
    rank_timeout: float = setting(
        60.0,
        above=0.0,
        maximum=30 * 86400.0,
        doc="Time that the processes wait for one of them before the run ends with an error [s].",
    )

    @property
    def exported_path(self) -> Path | None:
        """The checkpoint of one branch that a run writes at its end; None where it writes none."""
        return None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("data_parallel_replicate_degree", "zero_stage"), _only_sharded),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        "checkpoint_format": Foreign(
            "all checkpoints are files save_ckpt-N.pt; version 0.1.0 writes no directories (.dcp)",
            ("file",),
            inert=True,
        ),
        "ckpt_keep_ratio": Foreign("checkpoints kept in proportion to the run (see max_ckpt_keep)"),
        "ema_ckpt_keep": Foreign(
            "averages are in the checkpoints that max_ckpt_keep counts", inert=True
        ),
        "change_bias_after_training": Foreign("a bias fitted after training", (False,)),
        "enable_profiler": Foreign("a profile in TensorBoard's form (see profiling)", (False,)),
        "acc_freq": Foreign(
            "gradients summed over several steps (see accumulate_grad_batches)", (1,)
        ),
        "neighbor_graph_method": Foreign(
            "neighbour lists are built once on the host", ("auto",), inert=True
        ),
        "mixed_precision": Foreign(
            "TensorFlow's mixed precision (see the precision of descriptor and fitting_net)"
        ),
        **dict.fromkeys(
            (
                "kf_blocksize",
                "kf_start_pref_e",
                "kf_limit_pref_e",
                "kf_start_pref_f",
                "kf_limit_pref_f",
            ),
            Foreign("the Kalman filter optimizer"),
        ),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(RunSettings, BranchDataSettings):
    """Data, length and outputs of a run."""

    numb_epoch: float | None = setting(
        None,
        above=0.0,
        alias=("num_epoch", "num_epochs", "numb_epochs"),
        doc=(
            "Length of the run in passes over the data, by all processes together: on average, "
            "each system is seen in full at least this many times. Excludes numb_steps."
        ),
    )

    rules = (
        Rule(("numb_steps", "numb_epoch"), _one_length),
        *BranchDataSettings.rules,
        *RunSettings.rules,
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        **RunSettings.foreign,
        "model_prob": Foreign("probabilities of several models, but the input has one", ({},)),
        "num_epoch_dict": Foreign("epochs of several models, but the input has one", ({},)),
    }


# ----- training of several branches --------------------------------------------------------------


def _one_length_of_branches(
    numb_steps: int | None,
    num_epoch_dict: Mapping[str, float] | None,
    model_prob: Mapping[str, float] | None,
) -> str | None:
    if num_epoch_dict and numb_steps is not None:
        return f"excludes num_epoch_dict; found {numb_steps} and num_epoch_dict, keep one of them"
    if num_epoch_dict and model_prob:
        return "is missing; model_prob needs it and excludes num_epoch_dict: keep one of these two"
    if not num_epoch_dict and numb_steps is None:
        return "is missing; give numb_steps or num_epoch_dict"
    return None


def _some_probability(model_prob: Mapping[str, float] | None) -> str | None:
    if model_prob and not any(model_prob.values()):
        return "must have a probability above 0; found none"
    return None


def _known_branch(
    export_branch: str | None, data_dict: Mapping[str, BranchDataSettings]
) -> str | None:
    if export_branch is not None and export_branch not in data_dict:
        return f"must be one of the branches {', '.join(data_dict)}; found {export_branch!r}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTaskTrainingSettings(RunSettings):
    """Data of each branch, length and outputs of a run."""

    data_dict: Mapping[str, BranchDataSettings] = section(doc="Data of each branch, by its name.")
    model_prob: Mapping[str, float] | None = setting(
        None,
        minimum=0.0,
        doc=(
            "Probability that a step trains each branch; they need not sum to 1. By default "
            "proportional to the number of training systems."
        ),
    )
    num_epoch_dict: Mapping[str, float] | None = setting(
        None,
        above=0.0,
        doc=(
            "Length of the run in passes over the data of each branch. It also determines the "
            "branches' probabilities. Excludes numb_steps and model_prob."
        ),
    )
    stratified: bool = setting(
        False,
        doc=(
            "Train different branches on the processes of one step, in proportion to their "
            "probabilities, instead of one branch a step. A part is updated with the mean gradient "
            "of the processes whose branch has it."
        ),
    )
    export_branch: str | None = setting(
        None,
        doc=(
            "Branch whose model is also written alone when the run ends, as SAVE_CKPT.BRANCH.pt: a "
            "checkpoint of one model, without optimizer state."
        ),
    )

    @property
    def exported_path(self) -> Path | None:
        """The checkpoint of `export_branch` alone, which the run writes at its end."""
        if self.export_branch is None:
            return None
        return Path(f"{self.save_ckpt}.{self.export_branch}.pt")

    rules = (
        Rule(("numb_steps", "num_epoch_dict", "model_prob"), _one_length_of_branches),
        Rule(("model_prob",), _some_probability),
        Rule(("export_branch", "data_dict"), _known_branch),
        *RunSettings.rules,
    )
