"""`dp neighbor-stat`: count neighbours, to choose `sel`."""

from __future__ import annotations

import argparse
import logging
import math
from typing import TYPE_CHECKING

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.systems import add_label_options, begin, open_listed

if TYPE_CHECKING:
    from deepmd_muon.data import System

HELP = "find the shortest distance and the largest numbers of neighbours in a data set"

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's."""
    parser.add_argument(
        "-s",
        "--system",
        default=".",
        help=(
            "system, or a folder or file of systems: npy, HDF5, LMDB or any file that ASE reads "
            "[%(default)s]"
        ),
    )
    parser.add_argument("-r", "--rcut", type=float, required=True, help="cutoff radius [Å]")
    parser.add_argument(
        "-t",
        "--type-map",
        nargs="+",
        metavar="ELEMENT",
        help="types in the order of model/type_map, in which sel needs the numbers; by default all "
        "elements of the data: in the order that all systems have, else by atomic number, as dp "
        "train takes them",
    )
    parser.add_argument(
        "--mixed-type",
        "--one-type",
        action="store_true",
        help="count neighbours of all types together",
    )
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Count, and log the same lines as deepmd-kit."""
    import numpy as np

    from deepmd_muon.data import neighbor_statistics
    from deepmd_muon.data.checks.close_atoms import distance_problem

    if not (math.isfinite(options.rcut) and options.rcut > 0):
        raise CommandError(f"-r must be a number above 0 [Å]; found {options.rcut}")
    begin(options, systems={"the data": [options.system]})
    systems = open_listed(options.system, options.type_map, options)
    if options.type_map is None:
        systems = _with_one_type_map(systems)
        log.info("type_map: %s", list(systems[0].type_map or ()))
    statistics = neighbor_statistics(systems, options.rcut)
    sizes = [statistics.max_total] if options.mixed_type else list(statistics.max_neighbors)
    log.info("min_nbor_dist: %f", statistics.min_distance)
    log.info("max_nbor_size: %s", sizes)
    type_map = systems[0].type_map or ()
    if len(type_map) > 1 and not options.mixed_type:
        # The numbers above have no names, and sel has the order of the input's type_map.
        named = ", ".join(f"{name} {size}" for name, size in zip(type_map, sizes, strict=True))
        log.info("by element: %s; sel needs the order of model/type_map", named)
    every = [np.arange(system.nframes) for system in systems]
    if problem := distance_problem(systems, every, statistics.min_distance, options.rcut):
        log.warning("%s", problem)
    return 0


def _with_one_type_map(systems: list[System]) -> list[System]:
    """Return systems with the type map that all have, else with that of a run without one."""
    from deepmd_muon.data import with_common_types
    from deepmd_muon.data.opening import elements_of

    maps = {system.type_map for system in systems}
    if None in maps or len(maps) == 1:
        return with_common_types(systems)
    names = elements_of(systems)
    return [system.with_types(names) for system in systems]
