import numpy as np
import pytest
from small_models import jittered_water


@pytest.fixture(scope="session")
def water_frames():
    """Three frames of eight jittered molecules in a triclinic cell: coord, box, atype."""
    coord, box, atype = jittered_water(3)
    return coord, np.tile(box, (3, 1, 1)), np.tile(atype, (3, 1))
