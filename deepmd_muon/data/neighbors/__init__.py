"""Neighbour lists: found, cached, laid out for batches, refused where atoms are too far apart."""
