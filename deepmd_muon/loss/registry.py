"""The losses by the `type` they have in an input; torch-free.

A third party adds a loss::

    from deepmd_muon.loss import register_loss

    register_loss(
        "mine", settings="my_package.settings:MySettings", module="my_package.loss:MyLoss"
    )
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepmd_muon.loss.interface import Loss
from deepmd_muon.loss.settings import LossSettings
from deepmd_muon.registry import Part, Registry
from deepmd_muon.section import freeze

LOSSES = Registry("loss")
_ENER = Part(
    "deepmd_muon.loss.ener.settings:EnerLossSettings", "deepmd_muon.loss.ener.module:EnergyLoss"
)
_ENER_SPIN = Part(
    "deepmd_muon.loss.ener_spin.settings:EnerSpinLossSettings",
    "deepmd_muon.loss.ener_spin.module:SpinEnergyLoss",
)
LOSSES.register("ener", _ENER, aliases=("ener_hess",))
LOSSES.register("ener_spin", _ENER_SPIN)


def register_loss(
    name: str, *, settings: str | type, module: str | type, aliases: tuple[str, ...] = ()
) -> None:
    """Make a loss available as section `loss` of type `name`, or of one of its aliases.

    `settings` is a frozen dataclass derived from `LossSettings`, `module` a `Loss`, which is built
    from them and the type map.

    Raises
    ------
    NameTakenError
        When the name or an alias belongs to another loss.
    """
    LOSSES.register(name, Part(settings, module), aliases)


def build_loss(section: LossSettings | Mapping[str, Any], type_map: Sequence[str]) -> Loss:
    """Build the loss that a section `loss` describes.

    Parameters
    ----------
    section
        Its settings, or their plain form with `type` ("ener" if left out).
    type_map
        Names of the model's types, by number.

    Raises
    ------
    InvalidSettingError
        If a plain setting is unknown or wrong.
    """
    if not isinstance(section, LossSettings):
        section = freeze(LOSSES.settings_class(section.get("type", "ener")), section)
    loss: Loss = LOSSES.module(section)(section, tuple(type_map))
    return loss
