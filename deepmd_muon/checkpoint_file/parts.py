"""Read parts of tensors for torch.distributed.checkpoint, and nothing but tensors."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from deepmd_muon.checkpoint_file.archive import ArchiveError, load_archive
from deepmd_muon.files import open_regular


class TensorReader(FileSystemReader):
    """Reads tensors from the files of a folder; other values, which torch would unpickle, are refused.

    `metadata` is the folder's description, checked by `deepmd_muon.checkpoint_file.metadata.read_metadata`.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description that has been checked."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all parts of a plan into the tensors that the planner names."""
        for item in plan.items:
            part = self._read(item)
            for dimension, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape or target.dtype != part.dtype:
                raise pickle.UnpicklingError(
                    f"a part of {item.storage_index.fqn} is {part.dtype} of shape {tuple(part.shape)}, "
                    f"expected {target.dtype} of shape {tuple(target.shape)}"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> Tensor:
        """Return the part of a tensor as it was written."""
        name = item.storage_index.fqn
        if item.type is not LoadItemType.TENSOR:
            raise pickle.UnpicklingError(f"{name} is not a tensor")
        place = self._metadata.storage_data[item.storage_index]
        with open_regular(self._folder / place.relative_path) as file:
            file.seek(place.offset)
            content = file.read(place.length)
        try:
            part = load_archive(io.BytesIO(content))
        except ArchiveError as error:
            raise ArchiveError(f"{place.relative_path}, {name}: {error}") from error
        if type(part) is not Tensor or part.layout is not torch.strided:
            raise pickle.UnpicklingError(
                f"{place.relative_path} holds a {type(part).__name__} for {name}"
            )
        return part
