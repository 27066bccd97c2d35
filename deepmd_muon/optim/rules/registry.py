"""The registry of rules, and the rules that settings switch on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from importlib import import_module

from deepmd_muon.optim.config import RULES, HybridMuonConfig
from deepmd_muon.optim.errors import InvalidSettingError
from deepmd_muon.optim.rules.interface import Input, MatrixRule, StateTensor

# The rules of this package in the order in which they act; each class reads its own settings.
_CLASSES: tuple[type[MatrixRule], ...] = tuple(
    getattr(import_module(f"deepmd_muon.optim.rules.{module}"), name)
    for module, name in (rule.split(":") for rule in RULES)
)
_REGISTERED: dict[str, MatrixRule] = {}


def register_rule(rule: MatrixRule) -> None:
    """Make a rule available to the setting `rules` under its name.

    Registering it again replaces it.

    Parameters
    ----------
    rule
        An instance of a subclass of `MatrixRule` with its settings; it must be hashable, as frozen
        dataclasses are.

    Raises
    ------
    InvalidSettingError
        When its name or the key of a state tensor belongs to another rule, or a tensor has an
        extent that registered rules may not use.
    """
    for key, tensor in rule.tensors().items():
        if tensor.extent in ("parameter", "scalar"):
            raise InvalidSettingError(
                f"register_rule: {key!r} of {rule.name!r} has the extent {tensor.extent!r}; a "
                "rule's tensor has one number per 'blocks', 'rows' or 'columns'"
            )
    for registered in known_rules():
        if registered.name == rule.name and _name_of_class(registered) == _name_of_class(rule):
            continue
        if registered.name == rule.name:
            raise InvalidSettingError(
                f"register_rule: {rule.name!r} is the name of another rule, {registered}"
            )
        if shared := ", ".join(sorted(registered.tensors().keys() & rule.tensors().keys())):
            raise InvalidSettingError(
                f"register_rule: {rule.name!r} and {registered.name!r} both have the state {shared}"
            )
    _REGISTERED[rule.name] = rule
    matrix_rules.cache_clear()


def _name_of_class(rule: MatrixRule) -> tuple[str, str]:
    # A notebook that runs a cell again makes another class of the same name.
    return type(rule).__module__, type(rule).__qualname__


def known_rules() -> list[MatrixRule]:
    """Return all rules whose state a state dict may hold: this package's, and registered ones."""
    return [*itertools.chain(*(kind.forms() for kind in _CLASSES)), *_REGISTERED.values()]


def unknown_rules(names: Iterable[str]) -> list[str]:
    """Describe the names in the setting `rules` that are not registered.

    An empty list without any.
    """
    missing = ", ".join(repr(name) for name in names if name not in _REGISTERED)
    if not missing:
        return []
    registered = ", ".join(map(repr, _REGISTERED)) or "none"
    return [
        f"rules: no rule is registered as {missing}; registered are {registered}; import the "
        "module that calls register_rule first"
    ]


@functools.lru_cache(maxsize=256)
def matrix_rules(settings: HybridMuonConfig) -> tuple[MatrixRule, ...]:
    """Return the rules that settings switch on, in the order in which they act.

    Raises InvalidSettingError when the setting `rules` has a name that is not registered.
    """
    if problems := unknown_rules(settings.rules):
        raise InvalidSettingError(problems[0])
    switched_on = [kind.of(settings) for kind in _CLASSES]
    rules = [rule for rule in switched_on if rule is not None]
    return (*rules, *(_REGISTERED[name] for name in settings.rules))


def tensors_of(rules: Iterable[MatrixRule]) -> dict[str, StateTensor]:
    """Return the state tensors of some rules by key."""
    return {key: tensor for rule in rules for key, tensor in rule.tensors().items()}


def inputs_of(rules: Iterable[MatrixRule]) -> tuple[Input, ...]:
    """Return the inputs that rules request besides the directions, in the order of messages."""
    return tuple(sorted({kind for rule in rules for kind in rule.inputs}))
