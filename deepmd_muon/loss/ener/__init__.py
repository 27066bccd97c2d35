"""The `ener` loss: energy, force, virial, atomic energy and prefactored force, as DeePMD weighs them."""
