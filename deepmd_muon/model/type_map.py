"""Another type map for a trained model: its rows of types move to their new places.

Types that the model did not have keep the rows of a fresh model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.interface import TypeIndexed
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.interface import EnergyModel
from deepmd_muon.model.nn.type_embedding import TABLE, identity
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.model.settings import HostedSettings, ModelSettings, changed

_MOST_NAMES = 6  # that a message lists

TypePair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class TypeMove:
    """The change from the type map of a saved model to that of the present model.

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

    def rows(self, saved: Tensor, fresh: Tensor, axis: int) -> Tensor:
        """Return `fresh` with the rows of saved types from `saved`; rows of types are on `axis`."""
        targets = [k for k, name in enumerate(self.present) if name in self.saved]
        sources = [self.saved.index(self.present[k]) for k in targets]
        saved_rows = saved.to(fresh).index_select(axis, torch.tensor(sources))
        return fresh.clone().index_copy_(axis, torch.tensor(targets), saved_rows)

    def settings(self, saved: ModelSettings, present: ModelSettings) -> ModelSettings:
        """Return saved settings for the present types; new types take the present settings."""
        new_index = self._new_index()
        new_types = self._new_types()
        # Exclusions are indices, so that they change with the type map; dropped types go.
        atoms = [new_index[k] for k in saved.atom_exclude_types if k in new_index]
        atoms += [k for k in present.atom_exclude_types if k in new_types]
        changes: dict[str, Any] = {
            "type_map": self.present,
            "atom_exclude_types": _prefer_spelling(tuple(atoms), present.atom_exclude_types),
            "pair_exclude_types": self._move_pairs(
                saved.pair_exclude_types, present.pair_exclude_types
            ),
        }
        saved_pairs = getattr(saved.descriptor, "exclude_types", ())
        if saved_pairs:
            present_pairs = getattr(present.descriptor, "exclude_types", ())
            pairs = self._move_pairs(saved_pairs, present_pairs)
            changes["descriptor"] = changed(
                saved.descriptor, {"exclude_types": pairs}, "model/descriptor"
            )
        saved_energies = getattr(saved.fitting_net, "atom_ener", None)
        if saved_energies:
            present_energies = getattr(present.fitting_net, "atom_ener", None)
            if not present_energies:
                present_energies = [None] * len(self.present)
            # The checkpoint decides for its types.
            energies = dict(zip(self.present, present_energies, strict=True))
            energies.update(zip(self.saved, saved_energies, strict=True))
            atom_ener = tuple(energies[name] for name in self.present)
            changes["fitting_net"] = changed(
                saved.fitting_net, {"atom_ener": atom_ener}, "model/fitting_net"
            )
        return changed(saved, changes)

    def _move_pairs(
        self, saved: tuple[TypePair, ...], present: tuple[TypePair, ...]
    ) -> tuple[TypePair, ...]:
        """Return excluded pairs of types: saved ones, and of new types the present ones."""
        new_index = self._new_index()
        new_types = self._new_types()
        pairs = [
            (new_index[i], new_index[j]) for i, j in saved if i in new_index and j in new_index
        ]
        pairs += [pair for pair in present if new_types.intersection(pair)]
        return _prefer_spelling(tuple(pairs), present)

    def _new_index(self) -> dict[int, int]:
        """Return the present index of each saved type that still exists, by its saved index."""
        return {
            self.saved.index(name): k for k, name in enumerate(self.present) if name in self.saved
        }

    def _new_types(self) -> set[int]:
        """Return the present indices of new types."""
        return set(range(len(self.present))) - set(self._new_index().values())

    def describe(self) -> str:
        """Describe in one phrase which types move, start fresh and are dropped."""
        moving = [name for name in self.present if name in self.saved]
        dropped = [name for name in self.saved if name not in self.present]
        phrases = [f"rows of {_list_names(moving)} move"]
        if self.new:
            phrases.append(f"those of {_list_names(self.new)} start fresh")
        if dropped:
            phrases.append(f"those of {_list_names(dropped)} are dropped")
        return ", ".join(phrases)


def _prefer_spelling(types: tuple[Any, ...], spelled: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return types or pairs in the order in which an input spells them, if it means the same."""
    return spelled if _unordered(spelled) == _unordered(types) else types


def _unordered(types: tuple[Any, ...]) -> set[tuple[int, ...]]:
    return {tuple(sorted(entry)) if isinstance(entry, tuple) else (entry,) for entry in types}


def _list_names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    listed = names[: _MOST_NAMES - 1]
    return f"{', '.join(listed)} and {len(names) - len(listed)} more types"


def check_move(move: TypeMove, settings: ModelSettings, checkpoint: str = "the checkpoint") -> None:
    """Refuse another type map for the model of a checkpoint if that cannot have one.

    Raises
    ------
    ModelError
        If networks or a table belong to types, so that no rows can move.
    """
    if settings.use_srtab is not None:
        what = "a model with use_srtab"
        why = "its table has a column for each pair of types"
    elif not settings.descriptor.one_fitting_net:
        what = f"the descriptor {settings.descriptor.type!r}"
        why = "its networks belong to types"
    else:
        return
    change = f"take new types ({_list_names(move.new)})" if move.new else "change its type map"
    able = [
        name
        for name, settings_class in DESCRIPTORS.settings.items()
        if getattr(settings_class, "one_fitting_net", False)
    ]
    raise ModelError(
        f"model/type_map: {what} cannot {change}, because {why}. Keep the type_map of "
        f"{checkpoint}, {list(move.saved)} (types that the data lack do no harm), or train a new "
        f"model with a descriptor that takes new types later: {', '.join(able)}"
    )


def type_axes(model: EnergyModel) -> dict[str, int]:
    """Return the tensors that have a row for each type, by name, and the axis of these rows.

    Raises
    ------
    ModelError
        If a part of another package does not name its tensors.
    """
    if isinstance(model.settings, HostedSettings):
        raise ModelError(
            "optimizer state and averages of this model cannot follow another type map: start from "
            "its weights with --init-model, or keep the type map of the checkpoint"
        )
    axes = {"atomic_model.out_bias": 1, "atomic_model.out_std": 1}
    for name in ("descriptor", "fitting_net"):
        part = getattr(model.atomic_model, name)
        if not isinstance(part, TypeIndexed):
            raise ModelError(
                f"the type map of this model cannot change: its {name} ({type(part).__name__}) "
                "has no type_axes, which name the tensors with a row for each type; "
                "keep the type map of the checkpoint"
            )
        for tensor_name, axis in part.type_axes.items():
            axes[f"atomic_model.{name}.{tensor_name}"] = axis
    return axes


def move_weights(
    model: EnergyModel, saved: Mapping[str, Tensor], move: TypeMove
) -> dict[str, Tensor]:
    """Return saved weights in the shapes of a model with another type map.

    Parameters
    ----------
    model
        The present model, which has the weights and statistics of new types.
    saved
        State dict under our names.
    move
        The change of the type map.

    Raises
    ------
    ModelError
        See `check_move` and `type_axes`.
    """
    if isinstance(model.settings, HostedSettings):
        from deepmd_muon.model.hosted.type_map import with_type_map

        return with_type_map(model, saved, move.saved)
    check_move(move, model.settings)
    fresh_weights = model.state_dict()
    weights = dict(saved)
    for name, axis in type_axes(model).items():
        if name not in saved:
            continue
        old = saved[name]
        fresh = fresh_weights[name]
        if _without_axis(old.shape, axis) != _without_axis(fresh.shape, axis):
            continue  # an error when the weights are loaded
        if name.endswith(TABLE):
            # A type's vector includes the identity that some widths add.
            rows = move.rows(old + identity(old), fresh + identity(fresh), axis)
            weights[name] = rows - identity(rows)
        else:
            weights[name] = move.rows(old, fresh, axis)
    return weights


def _without_axis(shape: Sequence[int], axis: int) -> list[int]:
    return [*shape[:axis], *shape[axis + 1 :]]
