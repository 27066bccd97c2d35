"""deepmd-kit imports this module by the entry points ``deepmd.pt`` and ``deepmd.pt_expt``."""

import os

from deepmd_muon.deepmd_kit.activation import activate, is_requested

if is_requested(os.environ):
    activate()
