"""The parts a model is made of, by the `type` they have in an input; torch-free.

A part is named by strings `"module:attribute"` or by the objects themselves; strings are imported at first use, so
that reading an input imports no torch and a model imports only its own parts. A third party adds a part of its
own without touching this package::

    from deepmd_muon.model import register_descriptor

    register_descriptor("radial", settings="my_package.settings:RadialSettings", module="my_package.radial:Radial")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from deepmd_muon.model.errors import ModelError


@dataclasses.dataclass(frozen=True)
class Part:
    """Where one kind of descriptor or fitting net is defined.

    Attributes
    ----------
    settings
        Frozen dataclass of its section in the input.
    module
        `torch.nn.Module` that is built from these settings.
    deepmd_kit
        `Translation` between its state dict and deepmd-kit's; None when deepmd-kit has no such part.
    scripted
        Its form for frozen files, see `deepmd_muon.model.scripted.interface`; None when it cannot be frozen.
    tabulated
        Its form for compressed files, see there; None when it cannot be compressed.
    """

    settings: str | type
    module: str | type
    deepmd_kit: str | Any | None = None
    scripted: str | type | None = None
    tabulated: str | type | None = None


def _found(reference: Any) -> Any:
    """Return the object that a reference `"module:attribute"` names, or the object itself."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


class Registry:
    """The kinds of one part of a model.

    Attributes
    ----------
    settings
        Live view: name of each kind and its settings class.
    aliases
        Live view: other spellings and the name they stand for.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._parts: dict[str, Part] = {}
        self.aliases: dict[str, str] = {}
        self.settings: Mapping[str, type] = _SettingsView(self._parts)

    def register(self, name: str, part: Part, aliases: tuple[str, ...] = ()) -> None:
        """Add a kind.

        Raises
        ------
        ModelError
            When a name is taken by another part.
        """
        for wanted in (name, *aliases):
            taken = self._parts.get(self.aliases.get(wanted, wanted))
            if taken is not None and taken != part:
                raise ModelError(
                    f"the {self.what} name {wanted!r} is taken by {taken.module}; choose another"
                )
        self._parts[name] = part
        self.aliases.update(dict.fromkeys(aliases, name))

    def names(self) -> tuple[str, ...]:
        """Return every name and alias, sorted."""
        return tuple(sorted({*self._parts, *self.aliases}))

    def module(self, settings: Any) -> Any:
        """Return the module class that is built from these settings."""
        return _found(self._parts[self.name_of(settings)].module)

    def translation(self, settings: Any) -> Any:
        """Return the part's `Translation` to deepmd-kit, None when deepmd-kit has no such part."""
        return _found(self._parts[self.name_of(settings)].deepmd_kit)

    def scripted(self, settings: Any) -> Any:
        """Return the class for frozen files, None when the part has none."""
        return _found(self._parts[self.name_of(settings)].scripted)

    def tabulated(self, settings: Any) -> Any:
        """Return the class for compressed files, None when the part has none."""
        return _found(self._parts[self.name_of(settings)].tabulated)

    def settings_class(self, name: str) -> Any:
        """Return the settings class behind a name or an alias."""
        return self.settings[self.aliases.get(name, name)]

    def name_of(self, settings: Any) -> str:
        """Return the name of the kind that these settings belong to."""
        own = settings if isinstance(settings, type) else type(settings)
        return next(name for name in self._parts if self.settings[name] is own)


class _SettingsView(Mapping[str, type]):
    """Settings classes by name, imported on access."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> type:
        found: type = _found(self._parts[name].settings)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _own(folder: str, settings: str, module: str, *, tabulated: bool = False) -> Part:
    """Return a part of this package, from its folder and the names of its classes."""
    place = f"deepmd_muon.model.{folder}"
    return Part(
        f"{place}.settings:{settings}",
        f"{place}.module:{module}",
        f"{place}.deepmd_kit:TRANSLATION",
        f"{place}.scripted:Scripted{module}",
        f"{place}.tabulated:Tabulated{module}" if tabulated else None,
    )


DESCRIPTORS = Registry("descriptor")
DESCRIPTORS.register(
    "se_e2_a",
    _own("descriptor.se_e2_a", "SeE2ASettings", "SeE2A", tabulated=True),
    aliases=("se_a",),
)
DESCRIPTORS.register("dpa3", _own("descriptor.dpa3", "DPA3Settings", "DPA3"))
for _name, _settings, _aliases in (
    ("se_atten", "DPA1Settings", ("dpa1",)),
    ("se_atten_v2", "SeAttenV2Settings", ()),
):
    DESCRIPTORS.register(
        _name, _own("descriptor.dpa1", _settings, "DPA1", tabulated=True), aliases=_aliases
    )

FITTING_NETS = Registry("fitting net")
FITTING_NETS.register("ener", _own("fitting.ener", "EnerSettings", "EnergyFitting"))


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
    `deepmd_muon.model.descriptor.interface`. All further arguments are those of `Part`.

    Raises
    ------
    ModelError
        When a name is taken.
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
    """Make a fitting net available as `model/fitting_net` of type `name`; arguments as in `register_descriptor`.

    `settings` derives from `Section`, `module` is a `Fitting`: see `deepmd_muon.model.fitting.interface`.
    """
    FITTING_NETS.register(name, Part(settings, module, deepmd_kit, scripted), aliases)
