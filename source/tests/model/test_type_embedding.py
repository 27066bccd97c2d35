"""Rows of a table of types, and their gradients."""

import pytest
import torch

from deepmd_muon.model.nn.type_embedding import rows_of


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("shape", [(7,), (4, 5), (0,)])
def test_rows_and_gradients_are_those_of_indexing(rows, shape):
    random = torch.Generator().manual_seed(1)
    table = torch.randn(rows, 2, dtype=torch.float64, generator=random, requires_grad=True)
    index = torch.randint(rows, shape, generator=random)
    assert torch.equal(rows_of(table, index), table[index])
    torch.autograd.gradcheck(lambda x: rows_of(x, index), (table,))
    torch.autograd.gradgradcheck(lambda x: rows_of(x, index).sin(), (table,))
