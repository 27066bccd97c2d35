"""Mutants of files and of nested values, drawn from a seeded generator."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch

_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e300, -1e-300),
    *(float("nan"), float("inf"), "", "x", "auto", "\x00", "a" * 5000, "../..", "1e5"),
    *([], [[]], {}, {"type": "x"}, [None], [1e25], ["x"] * 50),
)


def bytes_mutant(content: bytes, draw: random.Random) -> bytes:
    """Return a file with bits flipped, bytes changed, a piece cut out, doubled, zeroed, or its end missing."""
    found = bytearray(content)
    if not found:
        return bytes([draw.randrange(256)])
    kind = draw.randrange(6)
    first = draw.randrange(len(found))
    last = min(len(found), first + draw.choice((1, 2, 8, 64, 4096)))
    if kind == 0:
        found[first] ^= 1 << draw.randrange(8)
    elif kind == 1:
        found[first:last] = draw.randbytes(last - first)
    elif kind == 2:
        del found[first:last]
    elif kind == 3:
        found[first:first] = found[first:last]
    elif kind == 4:
        found[first:last] = bytes(last - first)
    else:
        del found[first:]
    return bytes(found)


def tree_mutant(tree: Any, draw: random.Random) -> Any:
    """Return nested dicts, lists and tensors of which one value is strange, missing, moved or there twice."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    node, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0:
        node[key] = _strange(node[key], draw)
    elif kind == 1:
        del node[key]
    elif kind == 2:
        other, name = draw.choice(places)
        node[key] = copy.deepcopy(other[name])
    elif isinstance(node, dict):
        node[draw.choice(("x", "type", str(key).upper()))] = node[key]
    else:
        node.append(node[key])
    return tree


def _places(tree: Any):
    """Yield every container and key of a tree."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _strange(value: Any, draw: random.Random) -> Any:
    if isinstance(value, torch.Tensor) and draw.random() < 0.7:
        return draw.choice(
            (
                lambda: value[None],
                lambda: value.reshape(-1)[: value.numel() // 2],
                lambda: value.to(torch.complex64),
                lambda: value.to(torch.bool),
                lambda: torch.zeros(0),
                lambda: value.to(torch.float16),
                lambda: value.expand(3, *value.shape),
                lambda: list(value.shape),
            )
        )()
    return copy.deepcopy(draw.choice(_STRANGE))


def array_mutant(array: np.ndarray, draw: random.Random) -> np.ndarray:
    """Return an array of another shape, dtype, order or with strange values."""
    kinds = (
        lambda: array[..., :-1] if array.ndim else array,
        lambda: array[:-1],
        lambda: array[None],
        lambda: array.T,
        lambda: array.reshape(-1),
        lambda: np.asfortranarray(array),
        lambda: array.astype(draw.choice(("f2", "f4", ">f8", "i4", "c16", "?", "U12", "M8[s]"))),
        lambda: array * draw.choice((1e200, 0.0, float("nan"), float("inf"), -1.0)),
        lambda: np.zeros((0, *array.shape[1:])),
        lambda: np.array(draw.choice((0.0, "x", 1j))),
        lambda: array[::-1],
        lambda: np.zeros(array.shape[:1], dtype=[("x", "f8"), ("y", "i4")]),
    )
    with np.errstate(all="ignore"):
        return np.asarray(draw.choice(kinds)())
