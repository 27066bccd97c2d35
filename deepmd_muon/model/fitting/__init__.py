"""Fitting nets: from the descriptor of an atom to its energy, one folder a kind."""
