"""`python -m deepmd_muon` is the same program as `dp` and `dpmuon`."""

import sys

from deepmd_muon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
