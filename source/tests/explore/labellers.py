"""ASE calculators that go wrong, for processes that label."""

import os

import numpy as np
from ase.calculators.emt import EMT


class Faulty(EMT):
    """EMT that raises, crashes its process or returns NaN for structures with some number of atoms."""

    def __init__(self, raises=0, crashes=0, spoils=0, **others):
        super().__init__(**others)
        self.atoms_of = {"raises": raises, "crashes": crashes, "spoils": spoils}

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        if len(atoms) == self.atoms_of["raises"]:
            raise RuntimeError("the electrons did not converge")
        if len(atoms) == self.atoms_of["crashes"]:
            os._exit(9)
        super().calculate(atoms, properties, system_changes)
        if len(atoms) == self.atoms_of["spoils"]:
            self.results["forces"] = np.full((len(atoms), 3), np.nan)
