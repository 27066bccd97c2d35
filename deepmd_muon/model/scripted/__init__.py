"""Parts of a frozen file: functions and modules that `torch.jit.script` compiles.

The training path derives forces for a second derivative and feeds Triton kernels; a file for
molecular dynamics needs neither, must not depend on this package, and gets its neighbour list from
outside. So every part of a model has a second, shorter form here, built from the weights of the
first and compared with it whenever a file is written.

TorchScript reads annotations as objects: files with scripted classes do without `from __future__
import annotations`.
"""
