"""Weights of hosted models in another type map, by deepmd-kit's own change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.hosted.module import HostedModel
from deepmd_muon.model.interface import EnergyModel


def with_type_map(
    model: EnergyModel, saved: Mapping[str, Tensor], saved_map: Sequence[str]
) -> dict[str, Tensor]:
    """Return saved weights in the type map of a model.

    Parameters
    ----------
    model
        The present model, which has the statistics of new types.
    saved
        State dict of the saved model.
    saved_map
        Its type map.

    Raises
    ------
    ModelError
        If deepmd-kit cannot change the types of the model.
    """
    assert isinstance(model, HostedModel)
    if model.magnetic is not None:
        raise ModelError(
            "model/type_map: the types of a model that reads spins cannot change; keep the type_map "
            f"of the checkpoint, {list(saved_map)}"
        )
    former = HostedModel(dataclasses.replace(model.settings, type_map=tuple(saved_map)))
    former.load_state_dict(dict(saved), strict=False)
    try:
        former.hosted.change_type_map(list(model.type_map), model_with_new_type_stat=model.hosted)
    except (NotImplementedError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"model/type_map: deepmd-kit cannot change the types of this model ({error}); keep the "
            f"type_map of the checkpoint, {list(saved_map)} (types that the data lack do no harm)"
        ) from error
    return dict(former.state_dict())
