"""Neighbour search on the device that holds the atoms."""
