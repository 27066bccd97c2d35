"""The `ener` loss: errors of energy, force and virial, as DeePMD weighs them."""
