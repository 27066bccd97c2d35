"""Frozen files: a trained potential as a TorchScript program for LAMMPS, deepmd-kit's `DeepPot` and our predictor."""
