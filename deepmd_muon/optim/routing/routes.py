"""The route of each parameter: a pure function of its name, its shape and the rules."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Literal, NamedTuple, cast

from deepmd_muon.optim.config import HybridMuonConfig, MuonMode, VectorRoute
from deepmd_muon.optim.errors import ForeignStateError
from deepmd_muon.optim.routing.views import (
    FusedSplit,
    MatrixView,
    Shape,
    effective_shape,
    matrix_view,
)

Route = Literal["muon", "adam", "adamw", "frozen"]
ROUTES: tuple[Route, ...] = ("muon", "adam", "adamw", "frozen")

# The text of `RouteEntry.text`.
_ENTRY_FORM = re.compile(r"(?P<route>\w+) (?P<shape>scalar|\d+(?:x\d+)*)(?: as (?P<view>.+))?")

# Keys of groups of earlier versions; see `current_routes`.
_FORMER_LISTS = ("views", "shapes")

# Segments that torch.compile, DDP, FSDP1, activation checkpointing and DeePMD's model wrapper
# insert into names.
_WRAPPER_SEGMENTS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_WRAPPER_PREFIXES = re.compile(r"^(?:module\.)*(?:model\.Default\.)?")


@dataclasses.dataclass(frozen=True)
class RoutingRules:
    """The settings that determine a route, besides name and shape.

    Attributes
    ----------
    muon_mode
        See `deepmd_muon.optim.routing.views.matrix_view`.
    min_matrix_dim, vector_route
        Matrices whose smaller dimension is below this, vectors and biases take that route.
    adam_patterns, adamw_patterns
        Shell patterns on full names, tried before every other rule except `muon_patterns`.
    muon_patterns
        Shell patterns on full names, tried first.
    conv_patterns
        Shell patterns on full names of convolution kernels.
    expert_patterns
        Shell patterns on full names of parameters with one expert per index of the first dimension.
    splits
        Fused weights and how they are split, in the form of
        `deepmd_muon.optim.routing.views.FusedSplit`.
    """

    muon_mode: MuonMode = "slice"
    min_matrix_dim: int = 1
    vector_route: VectorRoute = "adam"
    adam_patterns: tuple[str, ...] = ()
    adamw_patterns: tuple[str, ...] = ()
    expert_patterns: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    muon_patterns: tuple[str, ...] = ()
    conv_patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> RoutingRules:
        """Return the rules among the optimizer's settings."""
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)}
        return cls(**{**values, "conv_patterns": values["conv_patterns"] or ()})


@dataclasses.dataclass(frozen=True)
class RouteEntry:
    """The route of one parameter, and the reason for it, which comparisons ignore."""

    name: str
    shape: Shape
    view: MatrixView | None
    route: Route
    reason: str = dataclasses.field(compare=False)

    @property
    def placement(self) -> str:
        """Route and view in one phrase, e.g. ``muon 1x240x1600``."""
        return f"{self.route} {self.view}" if self.view else self.route

    @property
    def text(self) -> str:
        """Route, shape and view, e.g. ``muon 240x40x40 as 1x240x1600``; state dicts store it."""
        return _entry_text(self.route, self.shape, str(self.view or ""))


class RouteTable(tuple[RouteEntry, ...]):
    """The routes of all parameters, in the optimizer's order; prints as a table."""

    def __str__(self) -> str:
        header = ("name", "shape", "view", "route", "reason")
        rows = [(e.name, _shape_text(e.shape), str(e.view or "-"), e.route, e.reason) for e in self]
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in [header, *rows]
        ]
        return "\n".join(line.rstrip() for line in lines)

    def summary(self) -> str:
        """Return one line: parameters and share of the weights per route."""
        counts = Counter(entry.route for entry in self)
        weights: Counter[str] = Counter()
        for entry in self:
            weights[entry.route] += math.prod(entry.shape)
        total = max(1, sum(weights.values()))
        statements = [
            f"{route} {counts[route]} parameters ({weights[route]} weights, "
            f"{100 * weights[route] / total:.1f} %)"
            for route in ROUTES
            if counts[route]
        ]
        return "; ".join(statements) or "no parameters"

    @classmethod
    def from_groups(cls, param_groups: Sequence[Mapping[str, Any]]) -> RouteTable:
        """Read the routing from the `param_groups` of a HybridMuon state dict.

        Raises
        ------
        ForeignStateError
            When a group has no routes, or an entry is damaged.
        """
        entries = []
        for number, group in enumerate(param_groups):
            texts = current_routes(group).get("routes")
            if texts is None:
                raise ForeignStateError(f"param_groups[{number}] has no list of routes")
            names = group.get("param_names") or [unnamed(number, i) for i in range(len(texts))]
            entries += [
                _parse_entry(canonical_name(name), text)
                for name, text in zip(names, texts, strict=True)
            ]
        return cls(entries)

    def texts(self) -> list[str]:
        """Return the entries as groups and state dicts store them under "routes"."""
        return [entry.text for entry in self]


def current_routes(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved group with its routes in today's form.

    Earlier versions had three lists, of routes, views and shapes; the first one had shapes as
    lists.
    """
    if not {"routes", *_FORMER_LISTS} <= group.keys():
        return group
    current = {
        key: value for key, value in group.items() if key not in (*_FORMER_LISTS, "routing_version")
    }
    rows = zip(group["routes"], group["shapes"], group["views"], strict=True)
    current["routes"] = [
        _entry_text(route, shape.split("x") if isinstance(shape, str) else shape, view)
        for route, shape, view in rows
    ]
    return current


def _entry_text(route: str, shape: Sequence[int | str], view: str) -> str:
    text = f"{route} {_shape_text(shape)}"
    return f"{text} as {view}" if view else text


def _shape_text(shape: Sequence[int | str]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _parse_entry(name: str, text: str) -> RouteEntry:
    """Read the text of a saved entry, and check that its parts are consistent."""
    match = _ENTRY_FORM.fullmatch(text)
    if match is None or match["route"] not in ROUTES:
        raise ForeignStateError(
            f"{name} has the entry {text[:60]!r} among the routes; it must look like 'adam 240' or "
            f"'muon 240x1600 as 1x240x1600', with one of {ROUTES}: the state is damaged, or of a "
            "later version of deepmd_muon"
        )
    shape = match["shape"]
    entry = RouteEntry(
        name=name,
        shape=() if shape == "scalar" else tuple(map(int, shape.split("x"))),
        view=_parse_view(name, match["view"]),
        route=cast("Route", match["route"]),
        reason="recorded",
    )
    fits = entry.view is None or math.prod(entry.view.shape) == math.prod(entry.shape)
    if not fits or (entry.route == "muon" and entry.view is None):
        raise ForeignStateError(
            f"{name} has the entry {text!r} among the routes: its view does not fit"
        )
    return entry


def _parse_view(name: str, text: str | None) -> MatrixView | None:
    try:
        view = MatrixView.parse(text or "")
    except ValueError as error:
        raise ForeignStateError(f"{name}: {error}") from None
    return view and view.simplified()


def is_local(name: str, settings: HybridMuonConfig) -> bool:
    """Return whether a plain parameter belongs to this process alone, even with `replicas`."""
    return any(fnmatchcase(name, pattern) for pattern in settings.local_patterns)


def unnamed(group: int, index: int) -> str:
    """Return the name of a parameter without one."""
    return f"group {group} parameter {index}"


def canonical_name(name: str) -> str:
    """Strip segments that wrappers add to a name (``module.``, ``_orig_mod.`` …)."""
    return _WRAPPER_PREFIXES.sub("", _WRAPPER_SEGMENTS.sub("", name))


def leaf_name(name: str) -> str:
    """Return the last dot-separated segment that is not a number, in lower case."""
    for segment in reversed(name.split(".")):
        if segment and not segment.isdigit():
            return segment.lower()
    return ""


def choose_route(
    name: str | None, shape: Shape, rules: RoutingRules, *, trainable: bool = True
) -> RouteEntry:
    """Route one parameter by its full name (None disables all rules on names) and its global shape.

    The entry has the canonical name, or "".
    """
    name = canonical_name(name) if name else ""
    decision = _decide(name, shape, rules)  # also refuses a split that does not fit
    if not trainable:
        decision = _Decision("frozen", "requires_grad is False")
    elif math.prod(shape) == 0:
        decision = _Decision("frozen", "has no elements")
    return RouteEntry(name, shape, decision.view, decision.route, decision.reason)


class _Decision(NamedTuple):
    """The route of a parameter, why it has it, and its matrix view on the Muon route."""

    route: Route
    reason: str
    view: MatrixView | None = None


def _decide(name: str, shape: Shape, rules: RoutingRules) -> _Decision:
    """Apply the rules in DeePMD's order; the user's own patterns come first."""
    forced = _matching(name, rules.muon_patterns)
    if forced is None:
        by_name = _decide_by_name(name, rules)
        if by_name is not None:
            return by_name
    is_deep = len(shape) > 2
    expert = _matching(name, rules.expert_patterns) if is_deep else None
    kernel = _matching(name, rules.conv_patterns) if is_deep and not expert else None
    matrix_shape = shape[1:] if expert else shape
    rank = len(effective_shape(matrix_shape))
    rank_text = f"effective rank {rank}{' of each expert' if expert else ''}"
    if rank < 2:
        return _Decision(rules.vector_route, rank_text)
    if kernel:
        view = _kernel_view(shape)
        if view is None:
            return _Decision(rules.vector_route, f"kernel {kernel!r} with one row or column")
        reason = f"kernel {kernel!r} as a matrix"
    else:
        view = matrix_view(matrix_shape, rules.muon_mode)
        if view is None and forced is not None:
            view = matrix_view(matrix_shape, "slice")
        if view is None:
            reason = f"{rank_text} has no matrix view in mode {rules.muon_mode!r}"
            return _Decision("adamw", reason)
        reason = f"matrix in mode {rules.muon_mode!r}"
    if expert:
        view = dataclasses.replace(view, batch=shape[0] * view.batch)
        reason = f"experts {expert!r}, each a {reason}"
    if forced is not None:
        reason = f"matches muon_patterns {forced!r}, {reason}"
    for split in map(FusedSplit.parse, rules.splits):
        if _matching(name, [split.pattern]):
            view = split.apply(view, name).simplified()
            reason += f", split {split.pattern!r}"
            break
    if kernel and view.min_dim == 1:
        return _Decision(rules.vector_route, f"kernel {kernel!r} of one channel each")
    if view.min_dim < rules.min_matrix_dim and forced is None:
        reason = f"smaller dimension {view.min_dim} is below min_matrix_dim {rules.min_matrix_dim}"
        return _Decision(rules.vector_route, reason)
    return _Decision("muon", reason, view)


def _kernel_view(shape: Shape) -> MatrixView | None:
    """Return the view of a convolution kernel (out, in, …): one matrix (out, in · …)."""
    rows = shape[0]
    columns = math.prod(shape[1:])
    return MatrixView(1, rows, columns) if rows > 1 and columns > 1 else None


def _decide_by_name(name: str, rules: RoutingRules) -> _Decision | None:
    """Return the route that a name alone determines; None if it determines none."""
    leaf = leaf_name(name)
    if pattern := _matching(name, rules.adam_patterns):
        return _Decision("adam", f"matches adam_patterns {pattern!r}")
    if pattern := _matching(name, rules.adamw_patterns):
        return _Decision("adamw", f"matches adamw_patterns {pattern!r}")
    if leaf == "b" or "bias" in leaf:
        return _Decision(rules.vector_route, f"leaf {leaf!r} is a bias")
    if leaf.startswith("adam_"):
        return _Decision("adam", f"leaf {leaf!r} selects Adam")
    if leaf.startswith("adamw_"):
        return _Decision("adamw", f"leaf {leaf!r} selects AdamW")
    return None


def adamw_patterns_of(
    substrings: Sequence[str], shapes: Mapping[str, Sequence[int]], muon_mode: MuonMode
) -> tuple[str, ...]:
    """Return `adamw_patterns` for matrices whose names contain one of some substrings.

    So a model of deepmd-kit declares which matrices of the Muon route AdamW steps.

    Parameters
    ----------
    substrings
        The parts of names.
    shapes
        Shape of every parameter by name.
    muon_mode
        The setting.
    """
    rules = RoutingRules(muon_mode)
    return tuple(
        escape(canonical_name(name))
        for name, shape in shapes.items()
        if any(substring in name for substring in substrings)
        and choose_route(name, tuple(shape), rules).route == "muon"
    )


def _matching(name: str, patterns: Sequence[str]) -> str | None:
    """Return the first shell pattern that a name matches; an empty name matches only '*'."""
    for pattern in patterns:
        if pattern == "*" or (name and fnmatchcase(name, pattern)):
            return pattern
    return None
