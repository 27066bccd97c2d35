import numpy as np
import pytest


@pytest.fixture(scope="session")
def water_frames():
    """Three frames of eight jittered molecules in a triclinic cell: coord, box, atype."""
    random = np.random.default_rng(7)
    box = np.array([[6.2, 0.0, 0.0], [0.5, 6.4, 0.0], [-0.3, 0.4, 6.0]])
    corners = np.stack(np.meshgrid(*[[0.1, 0.6]] * 3, indexing="ij"), axis=-1).reshape(-1, 3) @ box
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = (corners[:, None] + molecule).reshape(-1, 3) + random.normal(scale=0.08, size=(3, 24, 3))
    return coord, np.tile(box, (3, 1, 1)), np.tile([0, 1, 1], (3, 8))
