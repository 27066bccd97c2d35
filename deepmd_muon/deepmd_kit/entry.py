"""The module that deepmd-kit imports through the entry-point groups ``deepmd.pt`` and ``deepmd.pt_expt``."""

import os

from deepmd_muon.deepmd_kit.activation import activate, wanted

if wanted(os.environ):
    activate()
