"""Extensions from other packages, found by their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "deepmd_muon.plugins"


class PluginError(RuntimeError):
    """An installed extension of this package cannot be loaded."""


def load_plugins() -> None:
    """Import every installed module with an entry point in the group ``deepmd_muon.plugins``.

    At its import, a module registers its descriptors, fitting nets and settings.

    Raises
    ------
    PluginError
        When an import fails; the message names the extension and the error.
    """
    for point in entry_points(group=GROUP):
        _load(point)


def _load(point: EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:
        raise PluginError(
            f"the extension {point.name!r} ({point.value}) cannot be loaded: {error}"
        ) from error
