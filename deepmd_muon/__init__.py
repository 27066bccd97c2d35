"""DeePMD-style training of molecular potentials with the HybridMuon optimizer.

Importing this package imports neither torch nor triton; each subpackage (`optim`, `argcheck`,
`data`, `model`, `loss`, `train`, `infer`, `cli`) imports its dependencies when it is used.
"""

__version__ = "0.1.0"
