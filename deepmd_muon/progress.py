"""A bar on a terminal that says what is being done."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def tracked(
    items: Iterable[Item], what: str, total: int, done: int = 0
) -> Generator[Item, None, None]:
    """Yield items, and show how many of `total` are done if stderr is a terminal.

    `done` were done before. Log lines appear above the bar, which disappears at the end.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, completed=done)
        for item in items:
            yield item
            progress.advance(task)
