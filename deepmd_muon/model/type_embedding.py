"""The trained vector of each type that descriptors of mixed-type neighbour lists start from."""

from __future__ import annotations

import torch

from deepmd_muon.model.networks import Layer, SeedPath


class TypeEmbedding(torch.nn.Module):
    """One linear layer on one-hot types, under deepmd-kit's name `embedding.embedding_net.layers.0`.

    deepmd-kit gives the layer a residual connection. So where the width equals the number of types, or twice that, the
    identity (or two side by side) is added to the matrix.

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

    def __init__(self, ntypes: int, width: int, *, bias: bool, dtype: torch.dtype, stream: SeedPath) -> None:
        super().__init__()
        self.ntypes, self.width = ntypes, width
        layer = Layer(ntypes, width, timestep=False, bias=bias, dtype=dtype, stream=stream.child(0))
        self.embedding = torch.nn.Module()
        self.embedding.embedding_net = torch.nn.Module()
        self.embedding.embedding_net.layers = torch.nn.ModuleList([layer])
        self._layer = (layer,)  # a tuple, so that torch does not register the layer a second time

    def forward(self) -> torch.Tensor:
        """Return the vectors of all types `(ntypes, width)`."""
        layer = self._layer[0]
        table: torch.Tensor = layer.matrix if layer.bias is None else layer.matrix + layer.bias
        copies = self.width // self.ntypes if self.width in (self.ntypes, 2 * self.ntypes) else 0
        if copies:
            one = torch.eye(self.ntypes, dtype=table.dtype, device=table.device)
            table = table + torch.cat([one] * copies, dim=1)
        return table
