"""Importing deepmd-kit's PyTorch backend, also without MPI or under another torch than its own."""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import sys
import types

from deepmd_muon.model.errors import ModelError

log = logging.getLogger(__name__)

_MODELS = "deepmd.pt.model.model"
_OPERATORS = "deepmd.pt.cxx_op"


@functools.cache
def import_deepmd_kit() -> None:
    """Import deepmd-kit's models, once.

    Its wheel loads compiled operators on import. They need MPI and the torch that they were
    compiled with, and only compressed models and LAMMPS call them. If they cannot be loaded, the
    models are imported as in a build without operators.

    Raises
    ------
    ModelError
        If deepmd-kit is not installed, or lacks a package.
    """
    start_method = multiprocessing.get_start_method(allow_none=True)
    try:
        _import_models()
    except ImportError as error:
        raise ModelError(
            f"deepmd-kit's PyTorch backend cannot be imported ({error}): "
            "pip install 'deepmd-kit[torch]'"
        ) from error
    # deepmd-kit sets "fork", which hangs once threads run.
    multiprocessing.set_start_method(start_method, force=True)


def has_operators() -> bool:
    """Return whether deepmd-kit's compiled operators are loaded, after `import_deepmd_kit`."""
    return bool(sys.modules[_OPERATORS].ENABLE_CUSTOMIZED_OP)


def _import_models() -> None:
    try:
        importlib.import_module(_MODELS)
    except (ImportError, RuntimeError, OSError, StopIteration) as error:
        operators = types.ModuleType(_OPERATORS)
        operators.ENABLE_CUSTOMIZED_OP = False  # type: ignore[attr-defined]
        sys.modules[_OPERATORS] = operators
        try:
            importlib.import_module(_MODELS)
        except BaseException:
            del sys.modules[_OPERATORS]
            raise
        reason = str(error).partition("\n")[0]
        log.info("deepmd-kit's compiled operators are not loaded (%s); training needs none", reason)
