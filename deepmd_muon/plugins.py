"""Extensions from other packages, found by their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "deepmd_muon.plugins"


class PluginError(RuntimeError):
    """An extension that is installed beside this package cannot be loaded."""


def load_plugins() -> None:
    """Import every installed module that announces itself in the entry point group ``deepmd_muon.plugins``.

    Importing it is what registers its descriptors, fitting nets and settings.

    Raises
    ------
    PluginError
        Naming the extension and what went wrong.
    """
    for point in entry_points(group=GROUP):
        _load(point)


def _load(point: EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:
        raise PluginError(f"the extension {point.name!r} ({point.value}) cannot be loaded: {error}") from error
