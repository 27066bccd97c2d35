"""Neighbour lists found on the device where the atoms are."""
