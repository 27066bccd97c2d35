"""Settings of the other optimizers: a plain Muon, Adam and AdamW. Does not import torch."""

from __future__ import annotations

import dataclasses

from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.optim.config import (
    DEFAULT_ADAMW_PATTERNS,
    AdamImplementation,
    HybridMuonConfig,
    MuonMode,
    NonFinite,
    Precision,
    RouteChange,
    Scaling,
    Steps,
    WeightLayout,
)
from deepmd_muon.optim.sharded_config import ShardedSettings
from deepmd_muon.setting import setting, setting_like


@dataclasses.dataclass(frozen=True)
class MuonConfig(Buildable):
    """Settings of a plain Muon with AdamW for the rest, in the field's words; it is built as a `HybridMuon`.

    The defaults are those of the literature: Keller Jordan's five steps, no damping, two-dimensional weights only, and
    AdamW for embeddings, the output layer, positions and tokens. They are found by the types of modules
    (`deepmd_muon.optim.routing.modules`) and by name: what contains ``embed`` or ``lm_head``, and the weight of a layer
    called ``head``. `adamw_patterns` replaces both. Everything that is not a matrix takes AdamW too, with decay.
    """

    own_lr = 0.02

    momentum: float = setting_like(HybridMuonConfig, "momentum")
    normuon: bool = setting_like(HybridMuonConfig, "normuon")
    normuon_beta: float = setting_like(HybridMuonConfig, "normuon_beta")
    cautious_decay: bool = setting_like(HybridMuonConfig, "cautious_decay")
    rules: tuple[str, ...] = setting_like(HybridMuonConfig, "rules")
    nesterov: bool = setting_like(HybridMuonConfig, "nesterov")
    weight_decay: float = setting_like(HybridMuonConfig, "weight_decay", 0.1)
    scaling: Scaling = setting(
        "rectangular",
        doc=(
            "Scale of the Muon update: 'none' is 1, 'match_rms' is rms_coefficient·sqrt(max(rows, columns)), "
            "'rectangular' is sqrt(max(1, out/in)), 'spectral' is sqrt(out/in), with out and in by `layout`."
        ),
    )
    rms_coefficient: float = setting(0.2, above=0.0, doc="Coefficient of the 'match_rms' scaling.")
    layout: WeightLayout = setting_like(HybridMuonConfig, "layout")
    schedule: str | Steps = setting_like(HybridMuonConfig, "schedule", "keller-jordan")
    large_schedule: str | Steps | None = setting_like(HybridMuonConfig, "large_schedule")
    large_matrix_dim: int = setting_like(HybridMuonConfig, "large_matrix_dim")
    precision: Precision = setting_like(HybridMuonConfig, "precision")
    enable_gram: bool = setting_like(HybridMuonConfig, "enable_gram")
    flash_muon: bool = setting_like(HybridMuonConfig, "flash_muon")
    muon_mode: MuonMode = setting_like(HybridMuonConfig, "muon_mode", "2d")
    min_matrix_dim: int = setting_like(HybridMuonConfig, "min_matrix_dim")
    adam_lr_ratio: float = setting(
        1.0, above=0.0, doc="Learning rate of the AdamW route divided by that of the Muon route."
    )
    adam_betas: tuple[float, float] = setting((0.9, 0.95), minimum=0.0, below=1.0, doc="Decays of AdamW's moments.")
    adam_eps: float = setting_like(HybridMuonConfig, "adam_eps", 1e-8)
    adam_implementation: AdamImplementation = setting_like(HybridMuonConfig, "adam_implementation")
    adam_patterns: tuple[str, ...] = setting_like(HybridMuonConfig, "adam_patterns")
    adamw_patterns: tuple[str, ...] | None = setting(
        None,
        doc=(
            "Matrices whose full name matches one of these shell patterns take the AdamW route, as all vectors do. "
            "null finds embeddings, output layer, positions and tokens by the types of modules, and by the names "
            + ", ".join(DEFAULT_ADAMW_PATTERNS)
            + "."
        ),
    )
    expert_patterns: tuple[str, ...] = setting_like(HybridMuonConfig, "expert_patterns")
    local_patterns: tuple[str, ...] = setting_like(HybridMuonConfig, "local_patterns")
    splits: tuple[str, ...] = setting_like(HybridMuonConfig, "splits")
    on_route_change: RouteChange = setting_like(HybridMuonConfig, "on_route_change")
    on_nonfinite: NonFinite = setting_like(HybridMuonConfig, "on_nonfinite")
    offload: bool = setting_like(HybridMuonConfig, "offload")
    sharded: ShardedSettings = setting_like(HybridMuonConfig, "sharded")


@dataclasses.dataclass(frozen=True)
class AdamConfig(Buildable):
    """Settings of `torch.optim.Adam` with DeePMD's key names; the decay is an L2 term in the gradient."""

    adam_beta1: float = setting(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    adam_beta2: float = setting(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    weight_decay: float = setting(0.0, minimum=0.0, doc="L2 penalty added to the gradient.")
    adam_eps: float = setting(1e-8, above=0.0, doc="ε, added to the root of the second moment.")
    adam_implementation: AdamImplementation = setting("fused", doc="torch's implementation of the step.")


@dataclasses.dataclass(frozen=True)
class AdamWConfig(AdamConfig):
    """Settings of `torch.optim.AdamW` with DeePMD's key names; the decay is decoupled."""

    # deepmd-kit 3.2.0 documents 0.001, but its upgrade of older inputs fills in 0 before that default applies.
    weight_decay: float = setting(0.0, minimum=0.0, doc="Decoupled weight decay λ: p ← p (1 − lr λ).")


OptimizerConfig = HybridMuonConfig | MuonConfig | AdamConfig | AdamWConfig
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "HybridMuon": HybridMuonConfig,
    "Muon": MuonConfig,
    "Adam": AdamConfig,
    "AdamW": AdamWConfig,
}
