"""A part of a frozen file: the contract between the part's folder and `deepmd_muon.deploy`.

A part's folder holds `scripted.py` with a module that TorchScript compiles, built from the part's
trained module. The registry names it; a part without one cannot be frozen.

A scripted form may have `covers: Coverage`, the settings of its part that it implements: a model
with other settings cannot be frozen. Without it, the comparison of file and model alone decides.

A scripted descriptor is built as `cls(module)` and has

- attributes `message_passing: bool` (it needs all centres at once, and the features of neighbours)
  and `request: Request`;
- `describe(near: Near) -> tuple[Tensor, Tape]`: the descriptor `(ncentre, dim_out)`, and what its
  pullback needs;
- `pullback(adjoint, tape) -> Tensor`: dE/dr_ij `(ncentre, nnei, 3)` [eV/Å] from dE/dD.

The compressed form of a scripted descriptor has the same and is built as `cls(scripted, step=…,
nearest=…)`. It has tables of the embedding nets, with intervals `step` in their input, down to
distances `nearest` [Å], and is exact below.

A scripted fitting net is built as `cls(module)` and has

- attributes `numb_fparam: int`, `numb_aparam: int` and `default_fparam: Tensor` (empty if there is
  none), the frame and atomic parameters that it reads;
- `energy_and_slope(descriptor, counts, parameters) -> tuple[Tensor, Tensor]`: energies of the
  centres `(ncentre,)` [eV], float64, and dE/dD. The centres are sorted by type; `counts` says how
  many each type has. `parameters` is `(ncentre, numb_fparam + numb_aparam)`; a net without these
  attributes takes no `parameters`.
"""
