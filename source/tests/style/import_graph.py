"""The imports between the files of a package, wherever they stand: in functions, under TYPE_CHECKING and as strings.

Usage: python import_graph.py [PACKAGE]

prints the number of files and imports, a circle if there is one, and the imports that run upwards.

import-linter does not replace it: it counts a name that an `__init__` re-exports as an import of
that `__init__`, does not see imports as strings, and looks for circles between packages, not files.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[3] / "deepmd_muon"


class Statement(NamedTuple):
    """One import: the module, the names taken from it, the line, and whether it waits for a lookup in the module."""

    module: str
    names: tuple[str, ...]
    line: int
    lazy: bool


def modules_of(package: Path) -> dict[str, Path]:
    """Return the file of every module of a package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements_of(path: Path, package: str) -> Iterator[Statement]:
    """Yield every import of a file; a string that begins with the package's name and a dot counts as one."""
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Statement(alias.name, (), node.lineno, _is_lazy(node, parents))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield Statement(
                node.module or "",
                tuple(alias.name for alias in node.names),
                node.lineno,
                _is_lazy(node, parents),
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(f"{package}.")
        ):
            name = node.value.replace(":", ".")
            if all(part.isidentifier() for part in name.split(".")):
                yield Statement(name, (), node.lineno, lazy=True)


def _is_lazy(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether an `__init__` may import this as a lazy re-export: under TYPE_CHECKING, or when a name is looked up."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            return True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return True
    return False


def imports_of(package: Path) -> dict[tuple[str, str], int]:
    """Return every import between two files as (importer, imported) with its line.

    A name that an `__init__` re-exports counts as an import of the file that defines it. Lazy re-exports of an
    `__init__` itself are left out: they let a caller import from the package, and do not need what they re-export.
    """
    modules = modules_of(package)
    statements = {name: list(statements_of(path, package.name)) for name, path in modules.items()}
    exports = {
        name: {given: one.module for one in statements[name] for given in one.names}
        for name, path in modules.items()
        if path.name == "__init__.py"
    }

    def defining(module: str, name: str, seen: frozenset[str] = frozenset()) -> str:
        if f"{module}.{name}" in modules:
            return f"{module}.{name}"
        if module not in seen and name in exports.get(module, {}):
            return defining(exports[module][name], name, seen | {module})
        while module and module not in modules:
            module = module.rpartition(".")[0]
        return module

    edges: dict[tuple[str, str], int] = {}
    for importer, found in statements.items():
        for one in found:
            if importer in exports and one.lazy:
                continue
            for name in one.names or ("",):
                imported = defining(one.module, name)
                if imported not in ("", importer, package.name):
                    edges.setdefault((importer, imported), one.line)
    return edges


def circle_of(edges: Mapping[tuple[str, str], int]) -> list[str]:
    """Return files of which each imports the next, and the last the first; empty if there are none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for importer, imported in edges:
        sorter.add(importer, imported)
    try:
        sorter.prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def layer_of(module: str, layers: Sequence[str]) -> int:
    """Return the number of the layer of a module: the longest entry that is it or contains it."""
    fitting = [
        (len(layer), i) for i, layer in enumerate(layers) if f"{module}.".startswith(f"{layer}.")
    ]
    assert fitting, f"{module} is in no layer: name it in test_imports.py"
    return max(fitting)[1]


def upward(edges: Mapping[tuple[str, str], int], layers: Sequence[str]) -> list[str]:
    """Return the imports of a file in a higher layer, in words; `layers` come from the ground up."""
    return [
        f"{importer}, line {line}, imports {imported}, which lies above it"
        for (importer, imported), line in edges.items()
        if layer_of(imported, layers) > layer_of(importer, layers)
    ]


if __name__ == "__main__":
    from test_imports import LAYERS

    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    all_edges = imports_of(chosen)
    print(len(modules_of(chosen)), "files,", len(all_edges), "imports")
    if circle := circle_of(all_edges):
        print("a circle:", " imports ".join(circle))
    print(*upward(all_edges, LAYERS), sep="\n")
