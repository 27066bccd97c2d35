"""Settings of the optimizers as frozen dataclasses: the one place of each key's type, default, range and meaning.

This module does not import torch, so that the input checker can read it; the `build` methods do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from deepmd_muon.optim.errors import InvalidSettingError
from deepmd_muon.optim.sharded_config import ShardedSettings
from deepmd_muon.setting import check_settings, setting, setting_like

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    Replicas = DeviceMesh | ProcessGroup

MuonMode = Literal["2d", "flat", "slice"]
Scaling = Literal["none", "match_rms", "rectangular", "spectral"]
WeightLayout = Literal["auto", "as_stored", "in_out", "out_in"]
Precision = Literal["auto", "float16", "bfloat16", "float32", "float64"]
RouteChange = Literal["error", "migrate", "reset"]
NonFinite = Literal["ignore", "skip", "error"]
Steps = tuple[tuple[float, float, float], ...]

SCHEDULES = ("8+2", "keller-jordan", "polar-express", "polar-express-5", "polar-express-6", "muon-fsdp2")

# Parameters that `MuonConfig` excludes from Muon by default. Unlike a user's own patterns, they may match nothing.
DEFAULT_ADAMW_PATTERNS = ("*embed*", "*lm_head*", "head.weight", "*.head.weight")

# "*.in_proj.matrix: columns 64+64+32" or "*.qkv.weight: rows 3".
SPLIT_PATTERN = r"(?P<pattern>\S+): (?P<axis>rows|columns) (?P<sizes>\d+(\+\d+)*)"

SPLIT_SYNTAX = "of the form 'PATTERN: rows 3' or 'PATTERN: columns 64+64+32'"

# Keys of HybridMuon's first version, each with its replacement.
RENAMED_SETTINGS = {
    "muon_2d_only": 'muon_mode: "2d" for true, "flat" for false',
    "min_2d_dim": "min_matrix_dim",
    "muon_min_2d_dim": "min_matrix_dim",
}

T = TypeVar("T")
Builder = TypeVar("Builder", bound="Callable[..., Any]")

# The function that makes an optimizer from each settings class. `deepmd_muon.optim.build` registers them; it needs
# torch, and this module must not import it, so the package's __init__ says how to import it on first use.
_BUILDERS: dict[type, Callable[..., Optimizer]] = {}
_IMPORT_BUILDERS: list[Callable[[], object]] = []


def register_builder(settings: type) -> Callable[[Builder], Builder]:
    """Decorate the function that makes the optimizer of a settings class."""

    def register(build: Builder) -> Builder:
        _BUILDERS[settings] = build
        return build

    return register


def import_builders_with(load: Callable[[], object]) -> None:
    """Call `load` when the first optimizer is built; it imports the modules that register builders."""
    _IMPORT_BUILDERS.append(load)


def _builder_of(settings: object) -> Callable[..., Optimizer]:
    if type(settings) not in _BUILDERS:
        for load in _IMPORT_BUILDERS:
            load()
    return _BUILDERS[type(settings)]


class OptimizerSettings(Protocol):
    """What every configuration offers, and a third party's must offer to take its place."""

    def build(self, model: nn.Module, lr: float | Tensor | None = None, replicas: Replicas | None = None) -> Optimizer:
        """Make the optimizer for the named parameters of a model.

        Parameters
        ----------
        lr
            Learning rate; None takes the configuration's own.
        replicas
            Ranks on which parameters and gradients are equal (DDP). HybridMuon shares its work among them; of Adam and
            AdamW each keeps a part of the state (ZeRO-1).
        """
        ...


class _Buildable:
    """A configuration whose optimizer a registered builder makes; see `OptimizerSettings`."""

    def _own_lr(self) -> float:
        return 1e-3

    def build(self, model: nn.Module, lr: float | Tensor | None = None, replicas: Replicas | None = None) -> Optimizer:
        """Make this optimizer for the named parameters of `model`; see `OptimizerSettings`."""
        return _builder_of(self)(self, model, self._own_lr() if lr is None else lr, replicas)


def reject_renamed_settings(cls: type[T]) -> type[T]:
    """Decorate a class that takes HybridMuon's settings as keywords, so that renamed ones raise InvalidSettingError."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        if given := [f"{key} is now {new}" for key, new in RENAMED_SETTINGS.items() if key in kwargs]:
            raise InvalidSettingError(f"{cls.__name__}: {'; '.join(given)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]  # same arguments as `init`
    return cls


@reject_renamed_settings
@dataclasses.dataclass(frozen=True)
class HybridMuonConfig(_Buildable):
    """Settings of `HybridMuon`; the first ten keys are DeePMD's, with the defaults of deepmd-kit 3.2.0."""

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
        doc="Decoupled weight decay λ of the Muon and AdamW routes: p ← p (1 − lr λ). The Adam route has none.",
    )
    lr_adjust: float = setting(
        0.0,
        doc=(
            "DeePMD's combined switch. At or below 0 the Muon update is scaled by "
            "lr_adjust_coeff·sqrt(max(rows, columns)) and the Adam routes use the same learning rate. Above 0 it is "
            "scaled by sqrt(max(1, out/in)), with out and in by `layout`, and the Adam routes use lr/lr_adjust. The "
            "explicit settings `scaling` and `adam_lr_ratio` override either half."
        ),
    )
    lr_adjust_coeff: float = setting(
        0.18,
        above=0.0,
        doc=(
            "Coefficient of the 'match_rms' scaling of the Muon update. The default is DeePMD's; force fields learn "
            "faster with about 0.009/start_lr (see doc/learning-rate.md)."
        ),
    )
    muon_mode: MuonMode = setting(
        "slice",
        doc=(
            "How a parameter is seen as matrices, after dimensions of size 1 are dropped. '2d': rank 2 only; "
            "'flat': all leading dimensions become rows; 'slice': a batch of the last two dimensions."
        ),
    )
    enable_gram: bool = setting(
        True, doc="Iterate on the small Gram matrix where that is cheaper; never changes the coefficients."
    )
    flash_muon: bool = setting(
        True, doc="Use the fused GPU kernels where there are a GPU and Triton; the torch path runs otherwise."
    )
    magma_muon: bool = setting(
        True,
        doc=(
            "Magma damping: a block's update is multiplied by 0.1 + 0.9 s, where the score s follows the alignment "
            "of its momentum with its gradient."
        ),
    )
    nesterov: bool = setting(True, doc="Orthogonalize β m + (1 − β) g instead of m.")
    scaling: Scaling | None = setting(
        None,
        doc=(
            "Scale of the Muon update: 'none' is 1, 'match_rms' is lr_adjust_coeff·sqrt(max(rows, columns)), "
            "'rectangular' is sqrt(max(1, out/in)), 'spectral' is sqrt(out/in), with out and in by `layout`. null "
            "follows the sign of lr_adjust."
        ),
    )
    layout: WeightLayout = setting(
        "auto",
        doc=(
            "Which dimension of a matrix is its output, for 'rectangular' and 'spectral' scaling: 'in_out' for "
            "DeePMD's weights, 'out_in' for torch's. 'as_stored' takes rows as output, whatever they mean. 'auto' is "
            "'in_out' under `dp train`, unless deepmd_kit_arithmetic is true, and 'as_stored' elsewhere."
        ),
    )
    adam_lr_ratio: float | None = setting(
        None,
        above=0.0,
        doc=(
            "Learning rate of the Adam and AdamW routes divided by that of the Muon route. null follows lr_adjust: "
            "1 at or below 0, else 1/lr_adjust."
        ),
    )
    schedule: str | Steps = setting(
        "8+2",
        pattern="|".join(map(re.escape, SCHEDULES)),
        forms="one of " + ", ".join(map(repr, SCHEDULES)) + " or a list of triples",
        doc=(
            "Coefficients of the Newton–Schulz iteration (see doc/optimizer.md): a name, or one triple [a, b, c] per "
            "step σ ← a σ + b σ³ + c σ⁵."
        ),
    )
    precision: Precision = setting(
        "auto",
        doc=(
            "Operands of the matrix products; the iterate itself is kept in fp32 or wider. 'auto' is fp16 on a GPU "
            "and fp32 on a CPU."
        ),
    )
    min_matrix_dim: int = setting(
        1,
        minimum=1,
        doc=(
            "Matrices whose smaller dimension is below this take the Adam route (successor of the legacy key "
            "`min_2d_dim`)."
        ),
    )
    adam_patterns: tuple[str, ...] = setting(
        (), doc="Parameters whose full name matches one of these shell patterns take the Adam route."
    )
    adamw_patterns: tuple[str, ...] = setting(
        (), doc="Parameters whose full name matches one of these shell patterns take the AdamW route."
    )
    expert_patterns: tuple[str, ...] = setting(
        (),
        doc=(
            "Parameters of three or more dimensions whose full name matches one of these shell patterns hold one "
            "expert per index of their first dimension; muon_mode applies to each expert."
        ),
    )
    splits: tuple[str, ...] = setting(
        (),
        pattern=SPLIT_PATTERN,
        forms=SPLIT_SYNTAX,
        doc=(
            "Fused weights, one entry each: a shell pattern on full names, then 'rows' or 'columns' of the matrix as "
            "stored, then a number of equal parts or the sizes of the parts. Every part is orthogonalized separately. "
            "Example: '*.in_proj.matrix: columns 3'."
        ),
    )
    on_route_change: RouteChange = setting(
        "error",
        doc=(
            "What a reload does when a parameter's route or view differs from the checkpoint's: 'error' raises, "
            "'migrate' keeps the state that means the same, 'reset' discards the state of those parameters."
        ),
    )
    on_nonfinite: NonFinite = setting(
        "ignore",
        doc=(
            "What a step does when a gradient holds NaN or infinity: 'ignore': only that parameter becomes NaN; "
            "'skip': all parameters and state stay unchanged; 'error': raises (and waits for the device each step)."
        ),
    )
    offload: bool = setting(
        False,
        doc=(
            "Keep momenta and Adam's moments in pinned host memory between steps; during a step they are copied to the "
            "device and back in batches, concurrently with the computation. Results are the same: bitwise up to 16 M "
            "weights, beyond that up to rounding, because matrices are orthogonalized in smaller batches."
        ),
    )
    sharded: ShardedSettings = setting(
        ShardedSettings(),
        doc=(
            "How several processes share the step (see doc/sharded.md): how matrices are exchanged, and where state is "
            "kept. A single process ignores it."
        ),
    )
    deepmd_kit_arithmetic: bool = setting(
        False,
        doc=(
            "Orthogonalize as deepmd-kit 3.2.0 does, to compare with it: iterates stored in 16 bits, five "
            "Polar-Express steps for rectangular matrices when enable_gram is true. Noisier; `schedule` and "
            "`precision` have no effect then."
        ),
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def explicit(self) -> HybridMuonConfig:
        """Return the settings with `scaling`, `adam_lr_ratio` and `layout` resolved, which null and 'auto' leave open.

        Update rules read these three and never the sign of `lr_adjust`.
        """
        by_rms = self.lr_adjust <= 0
        return dataclasses.replace(
            self,
            scaling=self.scaling or ("match_rms" if by_rms else "rectangular"),
            adam_lr_ratio=self.adam_lr_ratio or (1.0 if by_rms else 1.0 / self.lr_adjust),
            layout="as_stored" if self.layout == "auto" else self.layout,
        )

    def _own_lr(self) -> float:
        return 5e-4


@dataclasses.dataclass(frozen=True)
class MuonConfig(_Buildable):
    """Settings of a plain Muon with AdamW for the rest, in the field's words; it is built as a `HybridMuon`.

    The defaults are those of the literature: Keller Jordan's five steps, no damping, two-dimensional weights only, and
    AdamW for embeddings and the output layer (names that contain ``embed`` or ``lm_head``, and the weight of a layer
    called ``head``); `adamw_patterns` replaces these. Everything that is not a matrix takes AdamW too, with decay.
    """

    lr: float = setting(0.02, minimum=0.0, doc="Learning rate of the Muon route, when `build` is not given one.")
    momentum: float = setting_like(HybridMuonConfig, "momentum", 0.95)
    nesterov: bool = setting_like(HybridMuonConfig, "nesterov", True)
    weight_decay: float = setting(0.1, minimum=0.0, doc="Decoupled weight decay of the Muon and AdamW routes.")
    scaling: Scaling = setting_like(HybridMuonConfig, "scaling", "rectangular")
    rms_coefficient: float = setting(0.2, above=0.0, doc="Coefficient of the 'match_rms' scaling.")
    layout: WeightLayout = setting_like(HybridMuonConfig, "layout", "out_in")
    schedule: str | Steps = setting_like(HybridMuonConfig, "schedule", "keller-jordan")
    precision: Precision = setting_like(HybridMuonConfig, "precision", "auto")
    muon_mode: MuonMode = setting_like(HybridMuonConfig, "muon_mode", "2d")
    adam_lr: float | None = setting(None, above=0.0, doc="Learning rate of the AdamW route; None takes `lr`.")
    adam_betas: tuple[float, float] = setting((0.9, 0.95), minimum=0.0, below=1.0, doc="Decays of Adam's moments.")
    adamw_patterns: tuple[str, ...] = setting(
        DEFAULT_ADAMW_PATTERNS, doc="Parameters that take AdamW though they are matrices, as shell patterns."
    )
    expert_patterns: tuple[str, ...] = setting_like(HybridMuonConfig, "expert_patterns", ())
    splits: tuple[str, ...] = setting_like(HybridMuonConfig, "splits", ())
    flash_muon: bool = setting_like(HybridMuonConfig, "flash_muon", True)
    offload: bool = setting_like(HybridMuonConfig, "offload", False)
    sharded: ShardedSettings = setting_like(HybridMuonConfig, "sharded", ShardedSettings())

    def __post_init__(self) -> None:
        check_settings(self)

    def _own_lr(self) -> float:
        return self.lr


@dataclasses.dataclass(frozen=True)
class AdamConfig(_Buildable):
    """Settings of `torch.optim.Adam` with DeePMD's key names; the decay is an L2 term in the gradient."""

    adam_beta1: float = setting(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    adam_beta2: float = setting(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    weight_decay: float = setting(0.0, minimum=0.0, doc="L2 penalty added to the gradient.")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclasses.dataclass(frozen=True)
class AdamWConfig(_Buildable):
    """Settings of `torch.optim.AdamW` with DeePMD's key names; the decay is decoupled."""

    adam_beta1: float = setting(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    adam_beta2: float = setting(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    # deepmd-kit 3.2.0 documents 0.001, but its upgrade of older inputs fills in 0 before that default applies.
    weight_decay: float = setting(0.0, minimum=0.0, doc="Decoupled weight decay λ: p ← p (1 − lr λ).")

    def __post_init__(self) -> None:
        check_settings(self)


OptimizerConfig = HybridMuonConfig | AdamConfig | AdamWConfig
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "HybridMuon": HybridMuonConfig,
    "Adam": AdamConfig,
    "AdamW": AdamWConfig,
}


def update_scale(shape: tuple[int, int], settings: HybridMuonConfig) -> float:
    """Return the factor of lr · O for a matrix of shape (rows, columns); `settings` must be explicit."""
    rows, columns = shape
    assert settings.scaling is not None
    if settings.scaling == "none":
        return 1.0
    if settings.scaling == "match_rms":
        return settings.lr_adjust_coeff * math.sqrt(max(rows, columns))
    out_over_in = columns / rows if settings.layout == "in_out" else rows / columns
    return math.sqrt(max(1.0, out_over_in) if settings.scaling == "rectangular" else out_over_in)
