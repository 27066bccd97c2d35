"""The rules of examples/update_rules, registered as a third party registers them."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "update_rules"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from radial_brake import RadialBrake  # noqa: E402, F401  # needs the path above
from soap_muon import MAX_DIM, SoapMuon, next_basis  # noqa: E402, F401  # needs the path above

SOAP = {"rules": ["soap_muon"]}
BRAKE = {"rules": ["radial_brake"]}
