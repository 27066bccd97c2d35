import numpy as np
import pytest
import torch
from small_models import jittered_water

from deepmd_muon.data import Frames


@pytest.fixture
def frames():
    """A periodic frame of 24 atoms, one without cell, and one of 12 atoms with padding."""
    coord, box, atype = jittered_water(3, scale=0.05)
    atype = np.tile(atype, (3, 1)).astype(np.int32)
    atype[2, 12:] = -1
    return Frames(atype=atype, coord=coord, box=np.stack([box, np.zeros((3, 3)), box]))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)
