"""Check input.json and freeze it into settings.

`load` reads a file, `normalize` takes its contents; both report every problem at once as an
`InputError`. For other programs, `gen_args` describes the input as dargs arguments.
"""

from deepmd_muon.argcheck.dargs_tree import gen_args, gen_args_multi_task
from deepmd_muon.argcheck.errors import DeepmdKitOnlyError, InputError, Problem
from deepmd_muon.argcheck.learning_rate import (
    CosineSettings,
    ExpSettings,
    LearningRateSettings,
    WSDSettings,
)
from deepmd_muon.argcheck.load import Input, dump, load, normalize
from deepmd_muon.argcheck.settings import Settings
from deepmd_muon.argcheck.training import (
    BranchDataSettings,
    RunSettings,
    TrainingDataSettings,
    TrainingSettings,
    ValidationDataSettings,
)
from deepmd_muon.argcheck.validating import ValidatingSettings
from deepmd_muon.section import Section

__all__ = [
    "BranchDataSettings",
    "CosineSettings",
    "DeepmdKitOnlyError",
    "ExpSettings",
    "Input",
    "InputError",
    "LearningRateSettings",
    "Problem",
    "RunSettings",
    "Section",
    "Settings",
    "TrainingDataSettings",
    "TrainingSettings",
    "ValidatingSettings",
    "ValidationDataSettings",
    "WSDSettings",
    "dump",
    "gen_args",
    "gen_args_multi_task",
    "load",
    "normalize",
]
