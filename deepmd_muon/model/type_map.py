"""Another type map for a trained model: rows of known types move, those of new types stay as a fresh model has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepmd_muon.model.descriptor.interface import TypeIndexed
from deepmd_muon.model.energy_model import EnergyModel
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.nn.type_embedding import TABLE, identity
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.model.settings import ModelSettings, changed


@dataclasses.dataclass(frozen=True)
class TypeMove:
    """The places of a saved model's types among those of the present model.

    Attributes
    ----------
    saved, present
        The type maps.
    """

    saved: tuple[str, ...]
    present: tuple[str, ...]

    @property
    def new(self) -> tuple[str, ...]:
        """Present types that the saved model does not have."""
        return tuple(name for name in self.present if name not in self.saved)

    def rows(self, saved: torch.Tensor, fresh: torch.Tensor, axis: int) -> torch.Tensor:
        """Return `fresh` with the rows of known types from `saved`; both have a row a type on `axis`."""
        known = [index for index, name in enumerate(self.present) if name in self.saved]
        sources = [self.saved.index(self.present[index]) for index in known]
        out = fresh.clone()
        out.index_copy_(
            axis, torch.tensor(known), saved.to(out).index_select(axis, torch.tensor(sources))
        )
        return out

    def settings(self, saved: ModelSettings, present: ModelSettings) -> ModelSettings:
        """Return saved settings for the present types; entries of new types come from the present settings."""
        place, new = self._places()
        atoms = [place[index] for index in saved.atom_exclude_types if index in place]
        atoms += [index for index in present.atom_exclude_types if index in new]
        changes: dict[str, Any] = {
            "type_map": self.present,
            "atom_exclude_types": _as_given(tuple(atoms), present.atom_exclude_types),
            "pair_exclude_types": self._moved_pairs(
                saved.pair_exclude_types, present.pair_exclude_types
            ),
        }
        pairs = getattr(saved.descriptor, "exclude_types", ())
        moved_pairs = self._moved_pairs(pairs, getattr(present.descriptor, "exclude_types", ()))
        if pairs:
            changes["descriptor"] = changed(
                saved.descriptor, {"exclude_types": moved_pairs}, "model/descriptor"
            )
        if known := getattr(saved.fitting_net, "atom_ener", None):
            given = getattr(present.fitting_net, "atom_ener", None) or [None] * len(self.present)
            energies = dict(zip(self.present, given, strict=True)) | dict(
                zip(self.saved, known, strict=True)
            )
            moved = tuple(energies[name] for name in self.present)
            changes["fitting_net"] = changed(
                saved.fitting_net, {"atom_ener": moved}, "model/fitting_net"
            )
        return changed(saved, changes)

    def _moved_pairs(
        self, saved: tuple[tuple[int, int], ...], present: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        """Return the excluded pairs of types, those with new types as present settings have them."""
        place, new = self._places()
        moved = [(place[a], place[b]) for a, b in saved if a in place and b in place]
        return _as_given((*moved, *(pair for pair in present if new.intersection(pair))), present)

    def _places(self) -> tuple[dict[int, int], set[int]]:
        """Return the present number of each saved type that still exists, and the numbers of new types."""
        place = {
            self.saved.index(name): index
            for index, name in enumerate(self.present)
            if name in self.saved
        }
        return place, set(range(len(self.present))) - set(place.values())

    def describe(self) -> str:
        """Describe in one phrase which types move, start fresh and are dropped."""
        dropped = [name for name in self.saved if name not in self.present]
        parts = [f"rows of {_some([name for name in self.present if name in self.saved])} move"]
        parts += [f"those of {_some(self.new)} start fresh"] if self.new else []
        parts += [f"those of {_some(dropped)} are dropped"] if dropped else []
        return ", ".join(parts)


def _as_given(moved: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return moved settings in the input's own spelling where both mean the same."""
    return given if _unordered(given) == _unordered(moved) else moved


def _unordered(types: tuple[Any, ...]) -> set[tuple[int, ...]]:
    return {tuple(sorted(entry)) if isinstance(entry, tuple) else (entry,) for entry in types}


def _some(names: Sequence[str]) -> str:
    return (
        ", ".join(names)
        if len(names) <= 6
        else f"{', '.join(names[:5])} and {len(names) - 5} more types"
    )


def check_move(move: TypeMove, settings: ModelSettings) -> None:
    """Refuse another type map for a model that cannot have one.

    Raises
    ------
    ModelError
        When networks or a table belong to types, so that no rows can move.
    """
    if settings.use_srtab is not None:
        what, why = "a model with use_srtab", "its table has a column for each pair of types"
    elif not settings.descriptor.one_fitting_net:
        what = f"the descriptor {settings.descriptor.type!r}"
        why = "its networks belong to types"
    else:
        return
    change = f"take new types ({_some(move.new)})" if move.new else "change its type map"
    able = [name for name, kind in DESCRIPTORS.settings.items() if _takes_new_types(kind)]
    raise ModelError(
        f"model/type_map: {what} cannot {change}, because {why}. Keep the type_map of the checkpoint, "
        f"{list(move.saved)} (types that the data lack do no harm), or train a new model with a descriptor that takes "
        f"new types later: {', '.join(able)}"
    )


def _takes_new_types(descriptor: Any) -> bool:
    """Return whether the class of a descriptor's settings says that its networks serve all types."""
    return bool(getattr(descriptor, "one_fitting_net", False))


def type_axes(model: EnergyModel) -> dict[str, int]:
    """Return the tensors that have a row for each type, by name, and the axis of these rows.

    Raises
    ------
    ModelError
        When a part of another package does not name its tensors.
    """
    parts = {
        "descriptor": model.atomic_model.descriptor,
        "fitting_net": model.atomic_model.fitting_net,
    }
    axes = {"atomic_model.out_bias": 1, "atomic_model.out_std": 1}
    for name, part in parts.items():
        if not isinstance(part, TypeIndexed):
            raise ModelError(
                f"the type map of this model cannot change: its {name} ({type(part).__name__}) has no type_axes, "
                "which name the tensors with a row for each type; keep the type map of the checkpoint"
            )
        axes |= {f"atomic_model.{name}.{tensor}": axis for tensor, axis in part.type_axes.items()}
    return axes


def move_weights(
    model: EnergyModel, saved: Mapping[str, torch.Tensor], move: TypeMove
) -> dict[str, torch.Tensor]:
    """Return saved weights in the shapes of a model with another type map.

    Parameters
    ----------
    model
        The present model; its weights and statistics are those of new types.
    saved
        State dict under our names.
    move
        Between the two type maps.

    Raises
    ------
    ModelError
        See `check_move` and `type_axes`.
    """
    check_move(move, model.settings)
    fresh, moved = model.state_dict(), dict(saved)
    for name, axis in type_axes(model).items():
        if name not in saved:
            continue
        old, new = saved[name], fresh[name]
        widths, wanted = ([*x.shape[:axis], *x.shape[axis + 1 :]] for x in (old, new))
        if widths != wanted:
            continue  # an error when the weights are loaded
        if name.endswith(TABLE):  # a type's vector includes the identity that some widths add
            rows = move.rows(old + identity(old), new + identity(new), axis)
            moved[name] = rows - identity(rows)
        else:
            moved[name] = move.rows(old, new, axis)
    return moved
