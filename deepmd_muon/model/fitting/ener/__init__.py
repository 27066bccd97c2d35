"""The fitting net `ener`: the energy of an atom from its descriptor."""
