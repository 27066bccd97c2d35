"""Settings of the optimizers: frozen dataclasses with each key's type, default, range and text.

This module does not import torch, so that the input checker can read it; the `build` methods import
it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from deepmd_muon.optim.buildable import MuonBuildable
from deepmd_muon.optim.words import understand_words
from deepmd_muon.setting import Needs, above_zero, check_settings, setting, switched_on

MuonMode = Literal["2d", "flat", "slice"]
Scaling = Literal["none", "match_rms", "rectangular", "spectral"]
WeightLayout = Literal["auto", "as_stored", "in_out", "out_in"]
Precision = Literal["auto", "float16", "bfloat16", "float32", "float64"]
RouteChange = Literal["error", "migrate", "reset"]
NonFinite = Literal["ignore", "skip", "error"]
VectorRoute = Literal["adam", "adamw"]
AdamImplementation = Literal["fused", "foreach", "for-loop"]
Replication = Literal["auto", "spread", "repeat"]
GatherDtype = Literal["full", "bfloat16"]
ReturnDtype = Literal["full", "bfloat16", "float16"]
StatePlace = Literal["replicated", "sharded"]
Steps = tuple[tuple[float, float, float], ...]

SCHEDULES = (
    "8+2",
    "keller-jordan",
    "polar-express",
    "polar-express-4",
    "polar-express-5",
    "polar-express-6",
    "muon-fsdp2",
)

# Module and class of each rule in `deepmd_muon.optim.rules`, in the order in which they act.
RULES = (
    "magma:Magma",
    "normuon:NorMuon",
    "cautious_decay:CautiousDecay",
    "master_weights:MasterWeights",
)

# Parameters that type "Muon" of an input excludes from Muon. No warning is given if one of these
# matches no name.
DEFAULT_ADAMW_PATTERNS = ("*embed*", "*lm_head*", "head.weight", "*.head.weight")

# For example "*.qkv.weight: rows 3", "*.q_b.weight: rows (128+64)*16+rest" or
# "*.linear_qkv.weight: rows 512+128+128 in 4 groups".
_SPLIT_TERM = r"(?:(?:\d+|\(\d+(?:\+\d+)*\))(?:\*\d+)?|rest)"
SPLIT_PATTERN = (
    rf"(?P<pattern>\S+): (?P<axis>rows|columns) (?P<sizes>{_SPLIT_TERM}(?:\+{_SPLIT_TERM})*)"
    r"(?: in (?P<groups>[1-9]\d*) groups)?"
)

# The schedule that follows deepmd-kit 3.2.0 in its rounding, too
# (`deepmd_muon.optim.polar.deepmd_kit`).
DEEPMD_KIT = "deepmd-kit"
_SCHEDULE_PATTERN = "|".join(map(re.escape, SCHEDULES))
_SCHEDULE_SYNTAX = "one of " + ", ".join(map(repr, SCHEDULES)) + " or a list of triples"

SPLIT_SYNTAX = (
    "of the form 'PATTERN: rows 3', 'PATTERN: columns 64+64+32', 'PATTERN: rows (128+64)*16+rest' "
    "or 'PATTERN: rows 512+128+128 in 4 groups'"
)


_BY_RMS = Needs(
    ("scaling",),
    lambda scaling: scaling == "match_rms",
    "scaling 'match_rms'",
    neutral=(0.18, 0.2),  # the defaults of deepmd-kit's versions, which it writes into out.json
)
_BY_LAYOUT = Needs(
    ("scaling", "normuon", "rules"),
    lambda scaling, normuon, rules: (
        scaling in ("rectangular", "spectral") or normuon or bool(rules)
    ),
    "scaling 'rectangular' or 'spectral', or normuon",
    neutral=("auto", "as_stored"),  # the translation of deepmd_kit_arithmetic gives it
)
_NOT_DEEPMD_KIT = Needs(
    ("schedule",), lambda schedule: schedule != DEEPMD_KIT, f"a schedule other than {DEEPMD_KIT!r}"
)


@dataclasses.dataclass(frozen=True)
class DeePMDSettings:
    """Settings of `HybridMuon` that DeePMD has, with the defaults of deepmd-kit 3.2.0."""

    momentum: float = setting(
        0.95,
        alias=("muon_momentum",),
        minimum=0.0,
        below=1.0,
        doc="Decay β of the Muon momentum m ← β m + (1 − β) g.",
    )
    adam_beta1: float = setting(
        0.9, minimum=0.0, below=1.0, doc="Decay of the first moment on the Adam and AdamW routes."
    )
    adam_beta2: float = setting(
        0.95, minimum=0.0, below=1.0, doc="Decay of the second moment on the Adam and AdamW routes."
    )
    weight_decay: float = setting(
        0.001,
        minimum=0.0,
        doc=(
            "Decoupled weight decay λ of the Muon and AdamW routes: p ← p (1 − lr λ). The Adam "
            "route has none."
        ),
    )
    lr_adjust_coeff: float = setting(
        0.18,
        above=0.0,
        needs=(_BY_RMS,),
        doc=(
            "Coefficient of the 'match_rms' scaling of the Muon update. The default is DeePMD's. "
            "If an input omits it, `dp train` uses 8.64 for runs of up to 3000 steps, 4.32 for "
            "runs of 10000 steps or more, and a value between for others. It multiplies this by "
            "0.001/start_lr if start_lr is higher than 0.001, and lowers it if descriptors are "
            "long (see doc/learning-rate.md)."
        ),
    )
    muon_mode: MuonMode = setting(
        "slice",
        any_case=True,
        doc=(
            "How a parameter is viewed as matrices, after dimensions of size 1 are dropped. '2d': "
            "rank 2 only; 'flat': all leading dimensions become rows; 'slice': a batch of the "
            "last two dimensions."
        ),
    )
    enable_gram: bool = setting(
        True,
        doc=(
            "Iterate on the small Gram matrix where that is cheaper; never changes the "
            "coefficients."
        ),
    )
    flash_muon: bool = setting(
        True,
        doc=(
            "Use the fused GPU kernels if there are a GPU and Triton; otherwise torch's operations "
            "run."
        ),
    )
    magma_muon: bool = setting(
        True,
        doc=(
            "Magma damping: a block's update is multiplied by 0.1 + 0.9 s, where the score s "
            "follows the alignment of its momentum with its gradient."
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """Settings of rules that every optimizer with a Muon route has.

    Magma's switch is among DeePMD's settings.
    """

    normuon: bool = setting(
        False,
        doc=(
            "NorMuon (arXiv:2510.05491): the update of each neuron of a matrix is divided by its "
            "running root mean square, and the matrix is rescaled to its former norm. Neurons are "
            "columns if `layout` is 'in_out', else rows."
        ),
    )
    normuon_beta: float = setting(
        0.95,
        minimum=0.0,
        below=1.0,
        needs=(switched_on("normuon"),),
        doc="Decay β₂ of the second moments of `normuon`, one per neuron.",
    )
    cautious_decay: bool = setting(
        False,
        needs=(above_zero("weight_decay"),),
        doc=(
            "Cautious weight decay (arXiv:2510.12402) on the Muon route: a weight decays only "
            "where the update does not move it away from zero."
        ),
    )
    master_weights: bool = setting(
        False,
        doc=(
            "Keep a float32 copy of every float16 and bfloat16 parameter, on all routes: a step "
            "changes the copy, and the parameter is the rounded copy. Without it, updates below "
            "half of a weight's last bit are lost. It takes 4 bytes per weight, in the layout of "
            "the momentum and, with `offload`, in host memory."
        ),
    )


@dataclasses.dataclass(frozen=True)
class ShardedSettings:
    """How several processes step the parameters that they share."""

    replication: Replication = setting(
        "auto",
        doc=(
            "Where several ranks hold the same elements (DDP, HSDP): 'spread' gives each matrix "
            "one owner among all replicas; 'repeat' gives it one owner per replica, which costs "
            "work and saves bytes. Replicas that repeat the work with state in parts gather the "
            "momenta before the step, if these fit a bucket. 'auto' takes the way that is "
            "predicted to be faster."
        ),
    )
    bucket_bytes: int = setting(
        128 * 2**20,
        minimum=1,
        doc=(
            "Bound on the bytes of the matrices that one rank orthogonalizes in one exchange, in "
            "full precision; a larger matrix goes alone. Inputs of rules come on top, and ranks "
            "that hold most of the elements may send more."
        ),
    )
    slots: int = setting(
        3,
        minimum=1,
        maximum=10,
        doc=(
            "Number of bucket-sized buffers, kept from step to step. With 3, one bucket is "
            "orthogonalized while the next is sent to its owners and the previous one back; 1 is "
            "strictly serial."
        ),
    )
    state: StatePlace = setting(
        "replicated",
        doc=(
            "Where plain parameters given with `replicas` keep momenta and Adam's moments: "
            "'replicated': whole on every rank; 'sharded': an equal part on each rank (ZeRO-1), "
            "as DTensors in the state dict. The state of DTensor parameters always has their "
            "layout. Under `dp train`, zero_stage 1 selects 'sharded'."
        ),
    )
    gather_dtype: GatherDtype = setting(
        "full",
        doc=(
            "Element type of the messages to the owner; 'full' is float32, or float64 for float64 "
            "parameters. Rounding before the orthogonalization amplifies the noise of low-rank "
            "matrices to full strength."
        ),
    )
    return_dtype: ReturnDtype = setting("full", doc="Element type of the returned updates.")
    free_gradients: bool = setting(
        False,
        doc=(
            "Set the gradient of an exchanged parameter to None as soon as its momentum is updated."
        ),
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MainSettings:
    """Settings that people change, besides those of DeePMD; the defaults are HybridMuon's."""

    scaling: Scaling = setting(
        "match_rms",
        doc=(
            "Scale of the Muon update: 'none' is 1, 'match_rms' is lr_adjust_coeff·sqrt(max(rows, "
            "columns)), 'rectangular' is sqrt(max(1, out/in)), 'spectral' is sqrt(out/in), with "
            "out and in by `layout`."
        ),
    )
    adam_lr_ratio: float = setting(
        1.0,
        above=0.0,
        doc=(
            "Learning rate of the Adam and AdamW routes divided by that of the Muon route. If an "
            "input omits both this and lr_adjust_coeff, `dp train` uses 30000/numb_steps, from 10 "
            "to 1. It lowers this if start_lr is higher than 0.001 or descriptors are long."
        ),
    )
    muon_patterns: Sequence[str] = setting(
        (),
        doc=(
            "Parameters whose full name matches one of these shell patterns take the Muon route, "
            "before every other rule, if they have two dimensions above 1. '*' also matches "
            "parameters without names."
        ),
    )
    splits: Sequence[str] = setting(
        (),
        pattern=SPLIT_PATTERN,
        forms=SPLIT_SYNTAX,
        doc=(
            "Fused weights, one entry each: a shell pattern on full names, then 'rows' or "
            "'columns' of the matrix as stored, then a number of equal parts or the sizes of the "
            "parts, in which '*' repeats and 'rest' is the remainder. Every part is "
            "orthogonalized separately. 'in 4 groups' gathers parts that are interleaved: each of 4 "
            "groups has a quarter of every part, in this order. Examples: "
            "``*.in_proj.matrix: columns 3``, "
            "``*.q_b_proj.weight: rows (128+64)*16``, ``*.kv_a_proj.weight: rows 512+rest``. "
            "`build` adds the splits that the modules of its model declare; with type Muon also "
            "q, k and v of nn.MultiheadAttention."
        ),
    )
    rules: Sequence[str] = setting(
        (),
        doc=(
            "Rules of other packages on the Muon route, by their registered names, in the order "
            "in which they act (see doc/add-an-update-rule.md)."
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvancedSettings(RuleSettings):
    """Settings that few people change; the defaults are HybridMuon's."""

    adam_weight_decay: float | None = setting(
        None,
        minimum=0.0,
        doc=(
            "Decoupled weight decay of the AdamW route, if it differs from that of the Muon route. "
            "null: weight_decay."
        ),
    )
    adam_eps: float = setting(
        1e-20,
        above=0.0,
        doc="ε of the Adam and AdamW routes, added to the root of the second moment.",
    )
    adam_implementation: AdamImplementation = setting(
        "fused",
        doc=(
            "How the Adam and AdamW routes step: by torch's 'fused' kernel, by multi-tensor "
            "operations ('foreach'), or by the same operations on one parameter after another "
            "('for-loop')."
        ),
    )
    nesterov: bool = setting(
        True, needs=(above_zero("momentum"),), doc="Orthogonalize β m + (1 − β) g instead of m."
    )
    layout: WeightLayout = setting(
        "auto",
        needs=(_BY_LAYOUT,),
        doc=(
            "Which dimension of a matrix is its output, for 'rectangular' and 'spectral' scaling: "
            "'in_out' for DeePMD's weights, 'out_in' for torch's. 'as_stored' takes rows as the "
            "output in both cases. 'auto' is 'in_out' under `dp train` and 'as_stored' elsewhere."
        ),
    )
    schedule: str | Steps = setting(
        "8+2",
        pattern=f"{_SCHEDULE_PATTERN}|{DEEPMD_KIT}",
        forms=_SCHEDULE_SYNTAX.replace("one of ", f"one of {DEEPMD_KIT!r}, "),
        nonempty=True,
        doc=(
            "Coefficients of the Newton–Schulz iteration (doc/polar-factor.md): a name, or one "
            "triple [a, b, c] per step σ ← a σ + b σ³ + c σ⁵. 'deepmd-kit' computes as deepmd-kit "
            "3.2.0, to compare with it: iterates stored in 16 bits, and five Polar-Express steps "
            "for rectangular matrices if enable_gram is true."
        ),
    )
    large_schedule: str | Steps | None = setting(
        None,
        needs=(_NOT_DEEPMD_KIT,),
        pattern=_SCHEDULE_PATTERN,
        forms=_SCHEDULE_SYNTAX,
        nonempty=True,
        doc=(
            "Schedule of matrices whose smaller dimension is at least large_matrix_dim, where "
            "time counts; null uses `schedule`. 'polar-express-5' suits language models."
        ),
    )
    large_matrix_dim: int = setting(
        1024,
        minimum=1,
        needs=(
            Needs(
                ("large_schedule",),
                lambda schedule: schedule is not None,
                "large_schedule",
            ),
            _NOT_DEEPMD_KIT,
        ),
        doc=(
            "Matrices whose smaller dimension is at least this use `large_schedule`, if it is "
            "given."
        ),
    )
    precision: Precision = setting(
        "auto",
        needs=(_NOT_DEEPMD_KIT,),
        doc=(
            "Operands of the matrix products; the iterate itself is kept in fp32 or wider. 'auto' "
            "is fp16 on a GPU and fp32 on a CPU. With 'bfloat16' up to 15 % of the update of a "
            "low-rank matrix is noise, and more with some schedules."
        ),
    )
    min_matrix_dim: int = setting(
        1,
        minimum=1,
        needs=(
            Needs(
                ("muon_patterns",),
                lambda patterns: "*" not in patterns,
                "muon_patterns without '*', which takes small matrices, too",
            ),
        ),
        doc=(
            "Matrices whose smaller dimension is below this take the route of vectors (successor "
            "of the legacy key `min_2d_dim`)."
        ),
    )
    adam_patterns: Sequence[str] = setting(
        (),
        doc="Parameters whose full name matches one of these shell patterns take the Adam route.",
    )
    conv_patterns: Sequence[str] | None = setting(
        None,
        doc=(
            "Convolution kernels (out, in, height, width), or of one or three such dimensions, by "
            "shell patterns on full names. Each is one matrix (out, in·height·width), whatever "
            "muon_mode says. null: `build` finds the convolution modules of its model, and "
            "divides the weights of grouped convolutions by groups."
        ),
    )
    expert_patterns: Sequence[str] = setting(
        (),
        doc=(
            "Parameters of three or more dimensions whose full name matches one of these shell "
            "patterns hold one expert per index of their first dimension; muon_mode applies to "
            "each expert."
        ),
    )
    local_patterns: Sequence[str] = setting(
        (),
        doc=(
            "Plain parameters whose full name matches one of these shell patterns belong to one "
            "process, which steps them by itself: for experts that differ between ranks. If ranks "
            "share the step (`replicas`), all other plain parameters are copies."
        ),
    )
    on_route_change: RouteChange = setting(
        "error",
        doc=(
            "How to load a parameter whose route or view differs from the checkpoint's: 'error' "
            "raises, 'migrate' keeps the state with the same meaning, 'reset' discards the state "
            "of those parameters. A parameter that is frozen, or trained again, keeps its state "
            "in any case."
        ),
    )
    on_nonfinite: NonFinite = setting(
        "ignore",
        doc=(
            "How to step when a gradient holds NaN or infinity: 'ignore': only that parameter "
            "becomes NaN; 'skip': all parameters and state stay unchanged; 'error': raises (and "
            "waits for the device each step)."
        ),
    )
    offload: bool = setting(
        False,
        doc=(
            "Keep momenta and Adam's moments in pinned host memory between steps; during a step "
            "they are copied to the device and back in batches, concurrently with the "
            "computation. Results are the same: bitwise up to 16 M weights, beyond that up to "
            "rounding, because matrices are orthogonalized in smaller batches."
        ),
    )
    sharded: ShardedSettings = setting(
        ShardedSettings(),
        doc=(
            "How several processes share the step (see doc/sharded.md): how matrices are "
            "exchanged, and where state is kept. A single process ignores it."
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonSettings(MainSettings, AdvancedSettings):
    """Settings that `HybridMuon` and a plain Muon share; the defaults are HybridMuon's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FurtherSettings(MuonSettings):
    """Settings that `HybridMuon` has besides those of DeePMD."""

    vector_route: VectorRoute = setting(
        "adam",
        doc=(
            "Route of biases, vectors and matrices below min_matrix_dim: 'adam', which decays no "
            "weights, or 'adamw', which does."
        ),
    )
    adamw_patterns: Sequence[str] = setting(
        (),
        doc="Parameters whose full name matches one of these shell patterns take the AdamW route.",
    )


# Numbers that a scheduler may change from step to step: those that do not decide routes.
SCHEDULED_NUMBERS = (
    "momentum",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "adam_weight_decay",
    "adam_lr_ratio",
    "lr_adjust_coeff",
    "adam_eps",
)


@understand_words
@dataclasses.dataclass(frozen=True)
class HybridMuonConfig(
    FurtherSettings, DeePMDSettings, MuonBuildable
):  # the fields of the last base come first
    """Settings of `HybridMuon`; the first nine keys are DeePMD's, with its defaults."""

    own_lr = 5e-4

    def explicit(self) -> HybridMuonConfig:
        """Return the settings with `layout` 'auto' resolved; update rules read it."""
        return dataclasses.replace(
            self, layout="as_stored" if self.layout == "auto" else self.layout
        )

    @property
    def structure(self) -> HybridMuonConfig:
        """These settings with the defaults of all numbers that a scheduler may change."""
        return self.with_numbers(_DEFAULT_NUMBERS)

    def with_numbers(self, numbers: Mapping[str, float | None]) -> HybridMuonConfig:
        """Return these settings with other `SCHEDULED_NUMBERS`; the caller checks them.

        `dataclasses.replace` would check all settings, in every step of a schedule.
        """
        changed = copy.copy(self)
        for key, value in numbers.items():
            object.__setattr__(changed, key, value)
        return changed

    @property
    def adamw_decay(self) -> float:
        """The weight decay of the AdamW route."""
        decay = self.adam_weight_decay
        return self.weight_decay if decay is None else decay

    def schedule_of(self, shape: Sequence[int]) -> str | Steps:
        """Return the schedule for matrices of a shape (..., rows, columns)."""
        if self.schedule == DEEPMD_KIT:
            return "8+2"  # of its square matrices; `polar_factors` has the others
        large = min(shape[-2:]) >= self.large_matrix_dim
        return self.large_schedule if large and self.large_schedule is not None else self.schedule


_DEFAULT_NUMBERS = {key: getattr(HybridMuonConfig, key) for key in SCHEDULED_NUMBERS}


def update_scale(shape: tuple[int, int], settings: HybridMuonConfig) -> float:
    """Return the factor of lr · O for a matrix of shape (rows, columns).

    `settings` must be explicit.
    """
    rows, columns = shape
    if settings.scaling == "none":
        return 1.0
    if settings.scaling == "match_rms":
        return settings.lr_adjust_coeff * math.sqrt(max(rows, columns))
    out_over_in = columns / rows if settings.layout == "in_out" else rows / columns
    return math.sqrt(max(1.0, out_over_in) if settings.scaling == "rectangular" else out_over_in)
