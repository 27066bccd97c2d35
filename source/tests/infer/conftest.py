import pytest
from small_models import SE_E2_A, jittered_water, section_of


@pytest.fixture(scope="session")
def model_section():
    """A small water model with every default filled in."""
    return section_of(SE_E2_A)


@pytest.fixture
def model(model_section):
    from deepmd_muon.model import build_model

    return build_model(model_section)


@pytest.fixture
def predictor(model):
    from deepmd_muon.infer import Predictor

    return Predictor(model, device="cpu")


@pytest.fixture
def committee(model_section):
    """Three models that differ in the seed of their fitting nets."""
    from deepmd_muon.infer import Predictor
    from deepmd_muon.model import build_model

    sections = [
        {**model_section, "fitting_net": {**model_section["fitting_net"], "seed": seed}}
        for seed in (2, 3, 4)
    ]
    return [Predictor(build_model(section), device="cpu") for section in sections]


@pytest.fixture(scope="session")
def water_atoms():
    """Eight jittered molecules in a triclinic cell: coord (24, 3), box (3, 3), atype (24,)."""
    coord, box, atype = jittered_water(1)
    return coord[0], box, atype
