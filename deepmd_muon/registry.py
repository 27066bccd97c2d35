"""Tables of the parts that an input names by `type`: descriptors, fitting nets, losses.

A part is named by strings `"module:attribute"` or by the objects themselves. Strings are imported
at first use, so that reading an input imports no torch, and a model imports only its own parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


class NameTakenError(ValueError):
    """A part is registered under the name of another part."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Where one part is defined.

    Attributes
    ----------
    settings
        Frozen dataclass of its section in the input.
    module
        Class that is built from these settings: a `torch.nn.Module`, or a loss.
    deepmd_kit
        `Translation` between its state dict and deepmd-kit's; None when deepmd-kit has no such
        part.
    scripted
        Its form for frozen files, see `deepmd_muon.model.scripted.interface`; None when it cannot
        be frozen.
    tabulated
        Its form for compressed files, see there; None when it cannot be compressed.
    """

    settings: str | type
    module: str | type
    deepmd_kit: str | Any | None = None
    scripted: str | type | None = None
    tabulated: str | type | None = None


class Registry:
    """The parts that can fill one section of the input.

    Parameters
    ----------
    what
        What a part is, for messages: "descriptor".

    Attributes
    ----------
    settings
        Live view: the settings class of each part, by name.
    aliases
        Other spellings of a name, and the name that each means.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.aliases: dict[str, str] = {}
        self._parts: dict[str, Part] = {}
        self.settings: Mapping[str, type] = _SettingsView(self._parts)

    def register(self, name: str, part: Part, aliases: tuple[str, ...] = ()) -> None:
        """Add a part; registering the same part again is allowed.

        Raises
        ------
        NameTakenError
            When the name or an alias belongs to another part.
        """
        for spelling in (name, *aliases):
            present = self._parts.get(self.aliases.get(spelling, spelling))
            if present is not None and present != part:
                raise NameTakenError(
                    f"the {self.what} name {spelling!r} is taken by {present.module}; "
                    "choose another"
                )
        self._parts[name] = part
        self.aliases.update(dict.fromkeys(aliases, name))

    def names(self) -> tuple[str, ...]:
        """Return every name and alias, sorted."""
        return tuple(sorted({*self._parts, *self.aliases}))

    def settings_class(self, name: str) -> Any:
        """Return the settings class of a name or an alias."""
        return self.settings[self.aliases.get(name, name)]

    def name_of(self, settings: Any) -> str:
        """Return the name of the part that a settings object, or its class, belongs to."""
        settings_class = settings if isinstance(settings, type) else type(settings)
        return next(name for name in self._parts if self.settings[name] is settings_class)

    def module(self, settings: Any) -> Any:
        """Return the class that is built from these settings."""
        return _resolve(self._part_of(settings).module)

    def translation(self, settings: Any) -> Any:
        """Return the part's `Translation` to deepmd-kit, None when deepmd-kit has no such part."""
        return _resolve(self._part_of(settings).deepmd_kit)

    def scripted(self, settings: Any) -> Any:
        """Return the class for frozen files, None when the part has none."""
        return _resolve(self._part_of(settings).scripted)

    def tabulated(self, settings: Any) -> Any:
        """Return the class for compressed files, None when the part has none."""
        return _resolve(self._part_of(settings).tabulated)

    def _part_of(self, settings: Any) -> Part:
        return self._parts[self.name_of(settings)]


class _SettingsView(Mapping[str, type]):
    """Settings classes by name, imported on access."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> type:
        settings: type = _resolve(self._parts[name].settings)
        return settings

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _resolve(reference: Any) -> Any:
    """Return the object that a reference `"module:attribute"` names, or the object itself."""
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
