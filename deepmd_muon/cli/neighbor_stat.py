"""`dp neighbor-stat`: count neighbours, to choose `sel`."""

from __future__ import annotations

import argparse
import logging
import math

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.systems import add_label_options, begin, open_listed

HELP = "find the shortest distance and the largest numbers of neighbours in a data set"

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's."""
    parser.add_argument(
        "-s",
        "--system",
        default=".",
        help="system, or a folder or file of systems: npy, HDF5, LMDB or any file that ASE reads [%(default)s]",
    )
    parser.add_argument("-r", "--rcut", type=float, required=True, help="cutoff radius [Å]")
    parser.add_argument(
        "-t",
        "--type-map",
        nargs="+",
        metavar="ELEMENT",
        help="types; by default all elements of the data",
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

    from deepmd_muon.data import neighbor_statistics, with_common_types
    from deepmd_muon.data.checks.close_atoms import distance_problem

    if not (math.isfinite(options.rcut) and options.rcut > 0):
        raise CommandError(f"-r must be a number above 0 [Å]; found {options.rcut}")
    begin(options, systems={"the data": [options.system]})
    systems = open_listed(options.system, options.type_map, options)
    if options.type_map is None:
        systems = with_common_types(systems)
        log.info("type_map: %s", list(systems[0].type_map or ()))
    statistics = neighbor_statistics(systems, options.rcut)
    sizes = [statistics.max_total] if options.mixed_type else list(statistics.max_neighbors)
    log.info("min_nbor_dist: %f", statistics.min_distance)
    log.info("max_nbor_size: %s", sizes)
    every = [np.arange(system.nframes) for system in systems]
    if problem := distance_problem(systems, every, statistics.min_distance, options.rcut):
        log.warning("%s", problem)
    return 0
