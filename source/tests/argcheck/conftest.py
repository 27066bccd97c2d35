"""Inputs that the tests of this folder start from."""

import copy

import pytest

_WATER = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [46, 92],
            "rcut_smth": 0.5,
            "rcut": 6.0,
            "neuron": [25, 50, 100],
            "resnet_dt": False,
            "axis_neuron": 16,
            "type_one_side": True,
            "seed": 1,
            "_comment": " that's all",
        },
        "fitting_net": {
            "neuron": [240, 240, 240],
            "resnet_dt": True,
            "seed": 1,
            "_comment": " that's all",
        },
        "data_stat_nbatch": 20,
        "_comment": " that's all",
    },
    "learning_rate": {"type": "exp", "decay_steps": 5000, "start_lr": 0.001, "stop_lr": 3.51e-8},
    "loss": {
        "type": "ener",
        "start_pref_e": 0.02,
        "limit_pref_e": 1,
        "start_pref_f": 1000,
        "limit_pref_f": 1,
    },
    "training": {
        "stat_file": "./se_e2_a",
        "training_data": {"systems": ["../data/data_0", "../data/data_1"], "batch_size": 1},
        "validation_data": {"systems": ["../data/data_3"], "batch_size": 1, "numb_btch": 3},
        "numb_steps": 100000,
        "seed": 10,
        "disp_file": "lcurve.out",
        "disp_freq": 100,
        "save_freq": 10000,
        "_comment": "that's all",
    },
    "_comment": "that's all",
}


@pytest.fixture(scope="session")
def pristine_water():
    """The water example of the PyTorch backend, not to be changed."""
    return _WATER


@pytest.fixture
def water():
    """The water example of the PyTorch backend, a fresh copy."""
    return copy.deepcopy(_WATER)


@pytest.fixture
def problems():
    """A function that returns the problems of an input as {path: message}."""
    from deepmd_muon.argcheck import InputError, normalize

    def found(data):
        with pytest.raises(InputError) as error:
            normalize(data)
        paths = [problem.path for problem in error.value.problems]
        assert len(paths) == len(set(paths)), paths
        return {problem.path: problem.message for problem in error.value.problems}

    return found
