"""Settings of the other optimizers: a plain Muon, Adam and AdamW. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from deepmd_muon.optim.buildable import Buildable, MuonBuildable
from deepmd_muon.optim.config import (
    DEFAULT_ADAMW_PATTERNS,
    AdamImplementation,
    AdvancedSettings,
    HybridMuonConfig,
    MuonMode,
    MuonSettings,
    Scaling,
    Steps,
    VectorRoute,
)
from deepmd_muon.optim.words import understand_words
from deepmd_muon.setting import InvalidSettingError, Needs, check_settings, setting, setting_like

# Settings of `MuonConfig` that `build` chooses if they are None.
CHOSEN_BY_BUILD = ("adamw_patterns", "expert_patterns", "vector_route", "adam_lr_ratio")


@understand_words
@dataclasses.dataclass(frozen=True, kw_only=True)
class Advanced(AdvancedSettings):
    """The settings of a plain Muon that few people change; `muon_for` has the others."""

    muon_mode: MuonMode = setting_like(HybridMuonConfig, "muon_mode", "2d")
    enable_gram: bool = setting_like(HybridMuonConfig, "enable_gram")
    flash_muon: bool = setting_like(HybridMuonConfig, "flash_muon")
    rms_coefficient: float = setting(
        0.2,
        above=0.0,
        needs=(Needs(("scaling",), lambda scaling: scaling == "match_rms", "scaling 'match_rms'"),),
        doc="Coefficient of the 'match_rms' scaling.",
    )
    schedule: str | Steps = setting_like(HybridMuonConfig, "schedule", "keller-jordan")
    adam_eps: float = setting_like(HybridMuonConfig, "adam_eps", 1e-8)
    expert_patterns: Sequence[str] | None = setting(  # type: ignore[assignment]  # of the base
        None,
        doc=(
            "Parameters of three or more dimensions whose full name matches one of these shell "
            "patterns hold one expert per index of their first dimension; muon_mode applies to "
            "each expert. null: `build` finds all parameters (b, m, n); `dp train` takes none."
        ),
    )
    vector_route: VectorRoute | None = setting(
        None,
        doc=(
            "Route of biases, vectors and matrices below min_matrix_dim: 'adam', which decays no "
            "weights, or 'adamw', which does. null: 'adam'; under `dp train` 'adamw'."
        ),
    )

    def __post_init__(self) -> None:
        check_settings(self)


@understand_words
@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig(Advanced, MuonSettings, MuonBuildable):
    """Settings of a plain Muon with AdamW for the rest; it is built as a `HybridMuon`.

    The defaults are those of the literature: Keller Jordan's five steps, no damping,
    and AdamW for embeddings, the output layer, positions and tokens. `build` finds them, and stacks
    of matrices such as experts, by the types of modules and the last segments of names
    (`deepmd_muon.optim.routing.modules`). `adamw_patterns` and `expert_patterns` replace the two
    searches. Biases, norms and other vectors take Adam, without decay.
    """

    own_lr = 0.02

    momentum: float = setting_like(HybridMuonConfig, "momentum")
    weight_decay: float = setting_like(HybridMuonConfig, "weight_decay", 0.1)
    scaling: Scaling = setting(
        "rectangular",
        doc=(
            "Scale of the Muon update: 'none' is 1, 'match_rms' is rms_coefficient·sqrt(max(rows, "
            "columns)), 'rectangular' is sqrt(max(1, out/in)), 'spectral' is sqrt(out/in), with "
            "out and in by `layout`."
        ),
    )
    adam_lr_ratio: float | None = setting(  # type: ignore[assignment]  # of the base
        None,
        above=0.0,
        doc=(
            "Learning rate of the Adam and AdamW routes divided by that of the Muon route. null: "
            "`build` takes 64 divided by the width of the largest table of embeddings, at most 1, "
            "and 1 without one or with the scaling 'match_rms'; `dp train` takes 1."
        ),
    )
    adam_betas: tuple[float, float] = setting(
        (0.9, 0.95), minimum=0.0, below=1.0, doc="Decays of AdamW's moments."
    )
    adamw_patterns: Sequence[str] | None = setting(
        None,
        doc=(
            "Matrices whose full name matches one of these shell patterns take the AdamW route. "
            "null: `build` finds embeddings, output layer, positions and tokens by the types of "
            "modules and the last segments of names; `dp train` takes those named "
            + ", ".join(DEFAULT_ADAMW_PATTERNS)
            + "."
        ),
    )

    def for_potentials(self) -> MuonConfig:
        """Return the settings of `dp train`, whose defaults stay those of earlier inputs."""
        former: dict[str, Any] = {
            "adamw_patterns": DEFAULT_ADAMW_PATTERNS,
            "expert_patterns": (),
            "vector_route": "adamw",
            "adam_lr_ratio": 1.0,
        }
        omitted = {key: value for key, value in former.items() if getattr(self, key) is None}
        return dataclasses.replace(self, **omitted)


@understand_words
@dataclasses.dataclass(frozen=True)
class AdamConfig(Buildable):
    """Settings of `torch.optim.Adam` with DeePMD's key names; the decay is an L2 term."""

    adam_beta1: float = setting(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    adam_beta2: float = setting(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    weight_decay: float = setting(0.0, minimum=0.0, doc="L2 penalty added to the gradient.")
    adam_eps: float = setting(1e-8, above=0.0, doc="ε, added to the root of the second moment.")
    adam_implementation: AdamImplementation = setting(
        "fused", doc="torch's implementation of the step."
    )


@understand_words
@dataclasses.dataclass(frozen=True)
class AdamWConfig(AdamConfig):
    """Settings of `torch.optim.AdamW` with DeePMD's key names; the decay is decoupled."""

    # deepmd-kit 3.2.0 documents 0.001, but its upgrade of older inputs fills in 0 before that
    # default applies.
    weight_decay: float = setting(
        0.0, minimum=0.0, doc="Decoupled weight decay λ: p ← p (1 − lr λ)."
    )


# By the value of the key `type` in the section `optimizer`; `register_optimizer` adds to it.
OPTIMIZERS: dict[str, type[Buildable]] = {
    "HybridMuon": HybridMuonConfig,
    "Muon": MuonConfig,
    "Adam": AdamConfig,
    "AdamW": AdamWConfig,
}


def register_optimizer(name: str, settings: type[Buildable]) -> None:
    """Make an optimizer available as section `optimizer` of type `name`.

    Registering a class again replaces it.

    Parameters
    ----------
    name
        Value of the key `type`.
    settings
        Frozen dataclass derived from `deepmd_muon.optim.Buildable`, with fields declared by
        `deepmd_muon.setting.setting`. Its method `build` has the form that `OptimizerSettings`
        declares, and passes ``model.named_parameters()`` to the optimizer.

    Raises
    ------
    InvalidSettingError
        When another class has the name, or the class is not such a dataclass.
    """
    before = OPTIMIZERS.get(name)
    if before is not None and (before.__module__, before.__qualname__) != (
        settings.__module__,
        settings.__qualname__,
    ):
        raise InvalidSettingError(
            f"register_optimizer: {name!r} is the name of {before.__qualname__}; choose another"
        )
    if not dataclasses.is_dataclass(settings) or not issubclass(settings, Buildable):
        raise InvalidSettingError(
            f"register_optimizer: {settings!r} must be a dataclass derived from Buildable"
        )
    OPTIMIZERS[name] = settings
