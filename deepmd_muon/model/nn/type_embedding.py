"""The trained vector of each type that descriptors of mixed-type neighbour lists start from."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from deepmd_muon.model.nn.layers import linear
from deepmd_muon.model.nn.networks import Layer, SeedPath

# Name of the matrix below a `TypeEmbedding`; its rows are types.
TABLE = "embedding.embedding_net.layers.0.matrix"


def identity(matrix: Tensor) -> Tensor:
    """Return what the residual connection adds to the matrix: one identity, two, or zeros."""
    ntypes, width = matrix.shape
    copies = width // ntypes if width in (ntypes, 2 * ntypes) else 0
    if not copies:
        return torch.zeros_like(matrix)
    eye = torch.eye(ntypes, dtype=matrix.dtype, device=matrix.device)
    return torch.cat([eye] * copies, dim=1)


class TypeEmbedding(torch.nn.Module):
    """A linear layer on one-hot types, with deepmd-kit's name `embedding.embedding_net.layers.0`.

    deepmd-kit gives the layer a residual connection. So if the width equals the number of types,
    or twice that, the identity (or two side by side) is added to the matrix.

    Parameters
    ----------
    ntypes, width
        Number of types, and length of each vector.
    bias
        Add a trained vector to every row (`use_tebd_bias`).
    dtype
        Precision of the parameters.
    stream
        Place of the embedding in the model; the layer is its child 0.
    """

    def __init__(
        self, ntypes: int, width: int, *, bias: bool, dtype: torch.dtype, stream: SeedPath
    ) -> None:
        super().__init__()
        self.ntypes = ntypes
        self.width = width
        layer = Layer(ntypes, width, timestep=False, bias=bias, dtype=dtype, stream=stream.child(0))
        self.embedding = torch.nn.Module()
        self.embedding.embedding_net = torch.nn.Module()
        self.embedding.embedding_net.layers = torch.nn.ModuleList([layer])
        self._layer = (layer,)  # a tuple, so that torch does not register the layer a second time

    def forward(self) -> Tensor:
        """Return the vectors of all types `(ntypes, width)`."""
        layer = self._layer[0]
        table: Tensor = layer.matrix if layer.bias is None else layer.matrix + layer.bias
        if self.width in (self.ntypes, 2 * self.ntypes):
            table = table + identity(layer.matrix)
        return table


# Torch's indexing sums gradients of tables with more rows.
_MOST_ROWS = 64


def _rows(table: Tensor, index: Tensor, count: int) -> Tensor:
    return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sum of the values of each of `count` rows."""
    one_hot = torch.arange(count, device=index.device).unsqueeze(1) == index.reshape(-1)
    return one_hot.to(values.dtype) @ values.reshape(-1, values.shape[-1])


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Return rows `(*index.shape, width)` of a small table, such as one with a row for each type.

    The gradient is a matrix product: torch's own adds thousands of rows to the same few, one after
    another on a CPU and by colliding atomic additions on a GPU.
    """
    if len(table) > _MOST_ROWS:
        return table[index]
    return linear(partial(_rows, count=len(table)), partial(_sums, count=len(table)), table, index)
