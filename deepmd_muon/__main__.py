"""`python -m deepmd_muon` is the same program as `dp` and `dpmuon`."""

import os
import sys

import deepmd_muon
from deepmd_muon.cli.main import main

if __name__ == "__main__":
    # `python -m` and `torchrun -m` search the current folder first for modules and plugins; `dp`
    # does not. A folder with data from elsewhere could then run code of its own, so it is removed,
    # unless it is a checkout of this package.
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(deepmd_muon.__file__)))
    if sys.path[:1] == [os.getcwd()] != [checkout]:
        del sys.path[0]
    sys.exit(main())
