"""Model sections that a module of deepmd-kit computes inside our training step.

A section is hosted if deepmd-kit has its model, this package has not, and the model gives energies.
deepmd-kit itself then checks and completes the section.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deepmd_muon.argcheck.errors import Problem
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.settings import HostedSettings, gives_energies


def can_host(model: Any, problems: Sequence[Problem], path: str = "model") -> bool:
    """Return whether a module of deepmd-kit can compute a model that we lack.

    Parameters
    ----------
    model
        The section in today's spelling.
    problems
        What keeps this package from computing it.
    path
        Its place in the input; problems elsewhere cannot be solved here.
    """
    return (
        isinstance(model, Mapping)
        and bool(problems)
        and all(problem.elsewhere and problem.path.startswith(f"{path}/") for problem in problems)
        and isinstance(branches := model.get("model_dict", {SINGLE: model}), Mapping)
        and all(map(gives_energies, branches.values()))
        and importlib.util.find_spec("deepmd") is not None
    )


def host(
    model: Mapping[str, Any], path: str, left_out: Collection[str] = ()
) -> HostedSettings | Problem:
    """Let deepmd-kit check and complete a section; return its settings or the problem.

    `left_out` are keys of our own, which deepmd-kit must not see.
    """
    try:
        from dargs.dargs import ArgumentError
        from deepmd import __version__
        from deepmd.utils.argcheck import model_args
    except ImportError as error:
        words = "needs deepmd-kit, which cannot be imported"
        return Problem(path, f"{words} ({error}): pip install 'deepmd-kit[torch]'")
    section = {key: value for key, value in model.items() if key not in left_out}
    arguments = model_args()
    try:
        section = arguments.normalize_value(section, trim_pattern="_*")
        arguments.check_value(section, strict=True)
        return HostedSettings.of(section)
    except (ArgumentError, ValueError, TypeError, KeyError, AttributeError) as error:
        place = getattr(error, "path", "")
        words = " ".join(str(getattr(error, "message", None) or error).split())
        return Problem(
            f"{path}/{place}" if place else path,
            f"deepmd-kit {__version__} refuses this model: {words}",
        )


def completed(settings: HostedSettings) -> HostedSettings:
    """Return the settings of a checkpoint with the defaults of the installed deepmd-kit.

    Checkpoints of earlier versions lack the keys that are new since. deepmd-kit builds their models
    with its defaults. A section that it refuses stays as it is.
    """
    hosted = host(settings.plain_form(), "model")
    return settings if isinstance(hosted, Problem) else hosted
