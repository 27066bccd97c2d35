"""Descriptors and fitting nets by the name that `type` has in a model section.

A third party adds its own kind without touching this package::

    from deepmd_muon.model import register_descriptor

    @register_descriptor("radial")
    class Radial(torch.nn.Module): ...

`Descriptor` and `Fitting` say what such a class must offer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from deepmd_muon.model.descriptor.environment import Environment
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.structures import Structures

Pullback = Callable[[torch.Tensor], torch.Tensor]
"""Maps dE/dD `(nreal, dim_out)` to dE/dr_ij `(nreal, nnei, 3)` [eV/Å]; differentiable once."""


class Described(NamedTuple):
    """What a descriptor says about every atom, and how its energy derivative reaches the edges.

    Attributes
    ----------
    descriptor
        Shape `(nreal, dim_out)`, atoms in the order of `Structures.order`.
    pullback
        See `Pullback`; None when the call asked for no forces.
    """

    descriptor: torch.Tensor
    pullback: Pullback | None


class Descriptor(Protocol):
    """A `torch.nn.Module` built as `cls(section, type_map, seed)` with these attributes."""

    rcut: float
    sel: tuple[int, ...]
    by_type: bool
    dim_out: int

    def __call__(self, structures: Structures, edges: torch.Tensor, *, force: bool) -> Described:
        """Describe every atom from its edge vectors `(nreal, nnei, 3)` [Å], float64."""


@runtime_checkable
class Standardised(Protocol):
    """What a descriptor offers besides when its environment rows are standardised with figures of the data."""

    def environment(self, structures: Structures, edges: torch.Tensor) -> Environment:
        """Return the rows of every edge before standardisation."""

    def used_slots(self, structures: Structures) -> torch.Tensor | None:
        """Tell which slots count as they are `(nreal, nnei)`, the others as zero; None when all do."""

    def set_statistics(self, mean: torch.Tensor, stddev: torch.Tensor) -> None:
        """Take mean and deviation of the rows per centre type `(ntypes, 4)`."""


class Fitting(Protocol):
    """A `torch.nn.Module` built as `cls(section, type_map, dim_in, seed)`."""

    def __call__(
        self, descriptor: torch.Tensor, type_counts: tuple[int, ...], *, force: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return atomic energies `(nreal,)` [eV], float64, and dE/dD like `descriptor` (None without force)."""


_Kind = TypeVar("_Kind", bound=type)
_DESCRIPTORS: dict[str, type] = {}
_FITTINGS: dict[str, type] = {}


def _register(table: dict[str, type], names: tuple[str, ...]) -> Callable[[_Kind], _Kind]:
    def add(cls: _Kind) -> _Kind:
        for name in names:
            if name in table and table[name] is not cls:
                raise ModelError(f"the name {name!r} is taken by {table[name].__qualname__}; choose another")
            table[name] = cls
        return cls

    return add


def register_descriptor(*names: str) -> Callable[[_Kind], _Kind]:
    """Class decorator: make a descriptor available as `model.descriptor.type` under these names."""
    return _register(_DESCRIPTORS, names)


def register_fitting(*names: str) -> Callable[[_Kind], _Kind]:
    """Class decorator: make a fitting net available as `model.fitting_net.type` under these names."""
    return _register(_FITTINGS, names)


def _find(table: dict[str, type], what: str, section: Mapping[str, Any], default: str | None) -> type:
    name = section.get("type", default)
    if name not in table:
        raise ModelError(f"{what} of type {name!r} is not known; known are {', '.join(sorted(table))}")
    return table[name]


def descriptor_class(section: Mapping[str, Any]) -> type[Any]:
    """Return the class that builds this descriptor section.

    Raises
    ------
    ModelError
        When its `type` is not registered.
    """
    return _find(_DESCRIPTORS, "a descriptor", section, None)


def known_descriptors() -> tuple[str, ...]:
    """Return the registered names of descriptors."""
    return tuple(sorted(_DESCRIPTORS))


def fitting_class(section: Mapping[str, Any]) -> type:
    """Return the class that builds this fitting section (`ener` when it names no type).

    Raises
    ------
    ModelError
        When its `type` is not registered.
    """
    return _find(_FITTINGS, "a fitting net", section, "ener")
