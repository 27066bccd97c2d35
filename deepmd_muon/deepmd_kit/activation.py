"""Activate HybridMuon of this package inside deepmd-kit."""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType

VARIABLE = "DEEPMD_MUON"
# The trainers of `dp --pt` and `dp --pt-expt`.
TRAINERS = ("deepmd.pt.train.training", "deepmd.pt_expt.train.training")
# The input check of all its commands, `dp doc-train-input` and `gen_args` for other programs
# included.
INPUT_CHECK = "deepmd.utils.argcheck"


class ActivationError(ValueError):
    """The environment variable DEEPMD_MUON has an invalid value."""


def is_requested(environment: Mapping[str, str]) -> bool:
    """Return whether the user wants this package's optimizer in deepmd-kit: ``DEEPMD_MUON=1``.

    Raises
    ------
    ActivationError
        When the variable is neither 1, 0 nor empty.
    """
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ActivationError(
            f"the environment variable {VARIABLE} must be 1 (deepmd-muon's HybridMuon inside "
            f"deepmd-kit) or 0; found {value!r}"
        )
    return value == "1"


def activate() -> None:
    """Extend deepmd-kit's input check and trainers, now or as soon as it imports them."""
    for name in (INPUT_CHECK, *TRAINERS):
        if name in sys.modules:
            _extend(sys.modules[name])
    sys.meta_path.insert(0, ModuleFinder())
    sys.excepthook = functools.partial(_print_error, sys.excepthook)


def _extend(module: ModuleType) -> None:
    """Extend a module of deepmd-kit that has been executed."""
    if module.__name__ == INPUT_CHECK:
        from deepmd_muon.deepmd_kit.settings import accept_further_keys

        accept_further_keys(module.opt_args_plugin)
    else:
        from deepmd_muon.deepmd_kit.trainer import extend

        extend(module)


def _print_error(
    print_traceback: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Print only the message of an input error; deepmd-kit alone would print its traceback."""
    if kind.__module__.partition(".")[0] in ("deepmd_muon", "dargs"):
        print(f"dp: {error}", file=sys.stderr)
    else:
        print_traceback(kind, error, traceback)


class ModuleFinder(importlib.abc.MetaPathFinder):
    """Extends deepmd-kit's input check and trainers as soon as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that Python finds, changed so that it extends the module.

        Return None for all other modules.
        """
        if fullname not in (INPUT_CHECK, *TRAINERS):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            _extend(module)

        spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec
