"""Checkpoints compared with each other, tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PARTS = ("model", "optimizer", "ema")


def tensors(node: object, path: str = "") -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, or of a part of it, by its path."""
    if isinstance(node, Tensor):
        return {path: node}
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, (list, tuple))
        else ()
    )
    return {
        key: value
        for name, inner in items
        for key, value in tensors(inner, f"{path}/{name}").items()
    }


def assert_same(
    first: dict[str, Any], second: dict[str, Any], tolerance: float = 0.0, parts: tuple = PARTS
) -> None:
    """Compare names, kinds, dtypes and values of all tensors in these parts of two checkpoints."""
    for part in parts:
        a, b = tensors(first.get(part)), tensors(second.get(part))
        assert a.keys() == b.keys()
        assert a or part != "model"
        for path, x in a.items():
            assert (type(b[path]), b[path].dtype) == (type(x), x.dtype), path
            # Magma's scores are kept in float32.
            score = tolerance and part == "optimizer" and x.dtype == torch.float32
            bound = max(tolerance, 1e-6) if score else tolerance
            torch.testing.assert_close(
                b[path], x, rtol=bound, atol=bound, msg=lambda text, path=path: f"{path} {text}"
            )
