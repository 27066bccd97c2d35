"""Frozen files: a potential as a TorchScript program for LAMMPS, `DeepPot` and our predictor."""
