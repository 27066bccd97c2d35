"""The `ener_spin` loss: errors of energy, force, magnetic force and virial."""
