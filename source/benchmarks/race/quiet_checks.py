"""Whether the checks of data stay quiet on sound sets: ``python quiet_checks.py [--race race-data]``.

Looks at the race's sets below a folder, which the ``make_*.py`` scripts beside this one fill, at the data of the
examples, and at the sound sets of the tests. Prints every warning; the exit status is their number, at most 100.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deepmd_muon.data import open_systems
from deepmd_muon.data.checks.labels import suspicions

TOP = Path(__file__).resolve().parents[3]


def places(race: Path | None, work: Path) -> Iterator[Path]:
    """Yield the folders and files of all sets; sets that are made here lie below `work`."""
    yield from sorted((TOP / "examples").glob("*/data"))
    yield from sorted((TOP / "examples").glob("*/*.hdf5"))
    yield from sorted((TOP / "examples").glob("*/all.xyz"))
    if race is not None:
        yield from sorted(folder for folder in race.iterdir() if folder.is_dir())
    sys.path.insert(0, str(TOP / "source" / "tests" / "data"))
    # the tests are not a package: their modules are found by the path above
    from sane_sets import FAST, SLOW, write_set

    for make in (*FAST, *SLOW):
        yield write_set(make(), work / make.__name__)


def main() -> int:
    """Look at all sets; return the number of warnings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--race", type=Path, help="folder of the race's sets")
    options = parser.parse_args()
    total = 0
    with tempfile.TemporaryDirectory() as work:
        for place in places(options.race, Path(work)):
            systems = open_systems(str(place))
            found = suspicions(systems)
            frames = sum(system.nframes for system in systems)
            print(f"{place.name}: {len(systems)} systems, {frames} frames, {len(found)} warnings")
            for sentence in found:
                print(f"  {sentence}", flush=True)
            total += len(found)
    print(f"{total} warnings")
    return min(total, 100)


if __name__ == "__main__":
    sys.exit(main())
