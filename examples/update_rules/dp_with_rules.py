"""The program `dp` with the rules of this folder: `python dp_with_rules.py --pt train input.json`."""

import sys

import radial_brake  # noqa: F401  # registers its rule
import soap_muon  # noqa: F401  # registers its rule

from deepmd_muon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
