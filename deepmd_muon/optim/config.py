"""Settings of the optimizers as frozen dataclasses: each key's default and meaning stand here, once.

This module does not import torch, so that the input checker can read it; the `build` methods do.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from deepmd_muon.optim.setting import check_settings, setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

MuonMode = Literal["2d", "flat", "slice"]
Scaling = Literal["match_rms", "rectangular"]
Precision = Literal["auto", "float16", "bfloat16", "float32", "float64"]
RouteChange = Literal["error"]

MUON_MODES: tuple[MuonMode, ...] = ("2d", "flat", "slice")
PRECISIONS: tuple[Precision, ...] = ("auto", "float16", "bfloat16", "float32", "float64")
SCHEDULES = ("8+2", "keller-jordan", "polar-express")


@dataclasses.dataclass(frozen=True)
class HybridMuonConfig:
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
            "scaled by sqrt(max(1, rows/columns)) and the Adam routes use lr/lr_adjust. The explicit settings "
            "`scaling` and `adam_lr_ratio` override either half."
        ),
    )
    lr_adjust_coeff: float = setting(0.18, above=0.0, doc="Coefficient of the 'match_rms' scaling of the Muon update.")
    muon_mode: MuonMode = setting(
        "slice",
        choices=MUON_MODES,
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
        choices=("match_rms", "rectangular"),
        doc=(
            "Scale of the Muon update: 'match_rms' is lr_adjust_coeff·sqrt(max(rows, columns)), 'rectangular' is "
            "sqrt(max(1, rows/columns)). null follows the sign of lr_adjust."
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
    schedule: str = setting(
        "8+2", choices=SCHEDULES, doc="Coefficients of the Newton–Schulz iteration (see doc/optimizer.md)."
    )
    precision: Precision = setting(
        "auto",
        choices=PRECISIONS,
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
    on_route_change: RouteChange = setting(
        "error",
        choices=("error",),
        doc="What a reload does when a parameter's route or view differs from the checkpoint's.",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def build(self, model: nn.Module, lr: float | Tensor) -> Optimizer:
        """Make this optimizer for the named parameters of `model`, with learning rate `lr`."""
        from deepmd_muon.optim.build import build_hybrid_muon

        return build_hybrid_muon(self, model, lr)


@dataclasses.dataclass(frozen=True)
class AdamConfig:
    """Settings of `torch.optim.Adam` with DeePMD's key names; the decay is an L2 term in the gradient."""

    adam_beta1: float = setting(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    adam_beta2: float = setting(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    weight_decay: float = setting(0.0, minimum=0.0, doc="L2 penalty added to the gradient.")

    def __post_init__(self) -> None:
        check_settings(self)

    def build(self, model: nn.Module, lr: float | Tensor) -> Optimizer:
        """Make this optimizer for the named parameters of `model`, with learning rate `lr`."""
        from deepmd_muon.optim.build import build_adam

        return build_adam(self, model, lr)


@dataclasses.dataclass(frozen=True)
class AdamWConfig:
    """Settings of `torch.optim.AdamW` with DeePMD's key names; the decay is decoupled."""

    adam_beta1: float = setting(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    adam_beta2: float = setting(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    # deepmd-kit 3.2.0 documents 0.001, but its upgrade of older inputs fills in 0 before that default applies.
    weight_decay: float = setting(0.0, minimum=0.0, doc="Decoupled weight decay λ: p ← p (1 − lr λ).")

    def __post_init__(self) -> None:
        check_settings(self)

    def build(self, model: nn.Module, lr: float | Tensor) -> Optimizer:
        """Make this optimizer for the named parameters of `model`, with learning rate `lr`."""
        from deepmd_muon.optim.build import build_adamw

        return build_adamw(self, model, lr)


OptimizerConfig = HybridMuonConfig | AdamConfig | AdamWConfig
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "HybridMuon": HybridMuonConfig,
    "Adam": AdamConfig,
    "AdamW": AdamWConfig,
}
