"""Forces for i-PI: python ipi_client.py MODEL [ADDRESS], a checkpoint or a frozen file."""

import sys

from ase.calculators.socketio import SocketClient
from ase.io import read

from deepmd_muon.infer import DeepPotCalculator

water = read("water.xyz")
water.calc = DeepPotCalculator(sys.argv[1])
SocketClient(unixsocket=sys.argv[2] if len(sys.argv) > 2 else "deepmd_muon").run(water)
