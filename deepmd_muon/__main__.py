"""`python -m deepmd_muon` is the same program as `dp` and `dpmuon`."""

import os
import sys

import deepmd_muon
from deepmd_muon.cli.main import main

if __name__ == "__main__":
    # `python -m` and `torchrun -m` look for modules and plugins in the current folder first, as `dp` does not: a folder
    # of data from elsewhere could bring code along. A checkout of this package is kept.
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(deepmd_muon.__file__)))
    if sys.path[:1] == [os.getcwd()] != [checkout]:
        del sys.path[0]
    sys.exit(main())
