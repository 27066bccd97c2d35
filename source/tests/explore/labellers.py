"""ASE calculators that go wrong, for processes that label."""

import os
import subprocess
import time
from pathlib import Path

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


class Hanging(EMT):
    """EMT that waits for ever for a program when a structure has two atoms; `note` gets the program's number."""

    def __init__(self, note, **others):
        super().__init__(**others)
        self.note = Path(note)

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        if len(atoms) == 2:
            with subprocess.Popen(["sleep", "100000"]) as program:
                beside = self.note.with_suffix(".new")
                beside.write_text(str(program.pid))
                beside.rename(self.note)
                time.sleep(100000)
        super().calculate(atoms, properties, system_changes)


def announced(**arguments) -> EMT:
    """Return a calculator, as the annotation says."""
    return EMT(**arguments)


def unannounced(note=None):
    """Return a calculator and say so nowhere; a call leaves a file."""
    Path(note).touch()
    return EMT()


class NoCalculator:
    """Has the method of a calculator but is none; a call leaves a file."""

    def __init__(self, note):
        Path(note).touch()

    def calculate(self):
        """Do nothing."""
