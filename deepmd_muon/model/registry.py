"""The descriptors and fitting nets by the `type` they have in an input. Imports no torch.

A third party adds a descriptor without touching this package::

    from deepmd_muon.model import register_descriptor

    register_descriptor(
        "radial", settings="my_package.settings:RadialSettings", module="my_package.radial:Radial"
    )
"""

from __future__ import annotations

from typing import Any

from deepmd_muon.registry import Part, Registry


def _package_part(folder: str, settings: str, module: str, *, tabulated: bool = False) -> Part:
    """Return a part of this package, from its folder and the names of its classes."""
    place = f"deepmd_muon.model.{folder}"
    return Part(
        settings=f"{place}.settings:{settings}",
        module=f"{place}.module:{module}",
        deepmd_kit=f"{place}.deepmd_kit:TRANSLATION",
        scripted=f"{place}.scripted:Scripted{module}",
        tabulated=f"{place}.tabulated:Tabulated{module}" if tabulated else None,
    )


DESCRIPTORS = Registry("descriptor")
DESCRIPTORS.register(
    "se_e2_a",
    _package_part("descriptor.se_e2_a", "SeE2ASettings", "SeE2A", tabulated=True),
    aliases=("se_a",),
)
DESCRIPTORS.register("dpa3", _package_part("descriptor.dpa3", "DPA3Settings", "DPA3"))
DESCRIPTORS.register(
    "se_atten",
    _package_part("descriptor.dpa1", "DPA1Settings", "DPA1", tabulated=True),
    aliases=("dpa1",),
)
DESCRIPTORS.register(
    "se_atten_v2",
    _package_part("descriptor.dpa1", "SeAttenV2Settings", "DPA1", tabulated=True),
)

FITTING_NETS = Registry("fitting net")
FITTING_NETS.register("ener", _package_part("fitting.ener", "EnerSettings", "EnergyFitting"))


def register_descriptor(
    name: str,
    *,
    settings: str | type,
    module: str | type,
    aliases: tuple[str, ...] = (),
    deepmd_kit: Any = None,
    scripted: str | type | None = None,
) -> None:
    """Make a descriptor available as `model/descriptor` of type `name`, or of one of its aliases.

    `settings` derives from `DescriptorSettings`, `module` is a `Descriptor`: see
    `deepmd_muon.model.descriptor.interface`. `deepmd_muon.registry.Part` explains the other
    arguments.

    Raises
    ------
    NameTakenError
        When the name or an alias belongs to another descriptor.
    """
    DESCRIPTORS.register(name, Part(settings, module, deepmd_kit, scripted), aliases)


def register_fitting(
    name: str,
    *,
    settings: str | type,
    module: str | type,
    aliases: tuple[str, ...] = (),
    deepmd_kit: Any = None,
    scripted: str | type | None = None,
) -> None:
    """Make a fitting net available as `model/fitting_net` of type `name`, or of one of its aliases.

    `settings` derives from `Section`, `module` is a `Fitting`: see
    `deepmd_muon.model.fitting.interface`. The other arguments are those of `register_descriptor`.

    Raises
    ------
    NameTakenError
        When the name or an alias belongs to another fitting net.
    """
    FITTING_NETS.register(name, Part(settings, module, deepmd_kit, scripted), aliases)
