"""Forces for i-PI: python ipi_client.py MODEL [ADDRESS]."""

import argparse
from pathlib import Path

from ase.calculators.socketio import SocketClient
from ase.io import read

from deepmd_muon.infer import DeepPotCalculator

parser = argparse.ArgumentParser(description="Forces for i-PI")
parser.add_argument("model", help="a checkpoint or a frozen file")
parser.add_argument("address", nargs="?", default="deepmd_muon", help="as in ipi.xml")
options = parser.parse_args()
if not Path("water.xyz").exists():
    parser.error("there is no water.xyz: run make_structure.py first")

water = read("water.xyz")
water.calc = DeepPotCalculator(options.model)
SocketClient(unixsocket=options.address).run(water)
