"""Triton kernels of the four passes over a layer's angles.

`dpa3.angles.Angles` defines the results, `nn.four_passes` the passes. `push_kernel` writes outputs
(pass 1, `value`) or their tangents (pass 3, `tangent`). `pull_kernel` turns derivatives by the
outputs into derivatives by the inputs: of the energy (pass 2, `adjoint`) or of the loss (pass 4,
`gradient`). An argument that a pass does not have is None; the compiler then drops its code.

A dot (`_dot`) marks tangents, a hat (`_hat`) the derivatives that the running pull propagates, a
bar (`_bar`) derivatives of the energy that pass 4 reads.

Notation (that of `dpa3.angles`)
--------------------------------
For all pairs (j, k) of neighbours of one atom, j = k included, with f applied to each element,

    z_jk = a_jk·W + u_j + t_k,   y = f(z),   m_j = s_j·Σ_k s_k·y_jk[:M],
    a′_jk = α·a_jk + ρ∘y_jk[M:].

| symbol | name        | shape             | meaning                                                |
|--------|-------------|-------------------|--------------------------------------------------------|
| a, a′  | `terms.a`   | (angles, A)       | angle features before and after the layer              |
| u, t   | `terms.u/t` | (slots, Y)        | terms of an edge as first and as second neighbour      |
| s      | `terms.s`   | (slots,)          | weight of an edge; 0 beyond the reach of an atom       |
| W      | `weight`    | (A, Y)            |                                                        |
| ρ      | `rho`       | (A,)              | step sizes; no elements if a′ is not wanted            |
| α      | `alpha`     | number            | weight of the old features                             |
| m      | `message`   | (slots, M)        |                                                        |

An atom has `n_near` neighbours in angles, a *slot* for each: slot = atom·n_near + j, and
angle = slot·n_near + k. Slots are numbered through all atoms, unlike in `kernels.edges`. A, M and Y
are the numbers of columns of a, m and y: Y = M if a′ is not wanted, M + A otherwise.

How the work is divided
-----------------------
A *tile* is one first neighbour j with one *block* of `tile_rows` second neighbours k. Its z, y and
their derivatives never leave the chip. Three axes of the grid divide the tiles:

| axis | size | a program takes                                                  |
|------|------|------------------------------------------------------------------|
| 0    | P    | every P-th atom                                                  |
| 1    | G    | of each atom a *group*: every G-th first neighbour               |
| 2    | B    | one block of second neighbours                                   |

Columns of y are taken in *chunks*, because a program's registers hold one chunk of W:

    for each chunk of y:
        for each atom of the program:
            for each first neighbour of the group within reach: compute the tile and store
            for each other first neighbour of the group: store zeros

In a block beyond the `reach` of an atom no first neighbour counts as within reach.

No two programs add to one number. Each writes parts, which are added up afterwards, always in the
same order:

- sums over second neighbours k (m, û): one part for each block;
- sums over first neighbours j (t̂): one part for each group;
- ŝ, a sum over columns of y: one part for each chunk and block as first neighbour, for each chunk
  and group as second neighbour;
- Ŵ, ρ̂, sums over all angles: one part for each program.

A program adds up the contributions of all chunks to â in memory.

Neighbours beyond the `reach` of an atom contribute nothing to any sum: s = ṡ = 0, and the cotangent
of a′ is 0 at their angles. The caller must not use a′ there. It is 0 for j beyond reach and in
blocks beyond reach. For k beyond reach in a block partly within, it is α·a + ρ∘y[M:].

All tensors are contiguous and in single precision. `test_kernels_of_dpa3` (in
`test_model_kernels.py`, by Triton's interpreter) compares the kernels with float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.kernels.shared import (
    MIN_DOT_SIDE,
    Tensors,
    add_parts,
    as_constexpr,
    concurrent_programs,
    contiguous,
    dot_precision,
    load_tile,
    tile_side,
)
from deepmd_muon.model.descriptor.dpa3.tensors import AngleCotangents, AngleTerms
from deepmd_muon.model.nn.activation import Formula
from deepmd_muon.model.nn.layer_kernels import curve


class AngleLayer(NamedTuple):
    """What all passes over one layer's angles share.

    Attributes
    ----------
    weight
        W (A, Y).
    rho
        ρ (A,); None if a′ is not wanted.
    reach
        How many leading neighbours of each atom take part (atoms,), int32.
    n_near
        Neighbours of each atom in angles.
    message_columns
        M.
    alpha
        α.
    formula
        Of the activation f.
    """

    weight: Tensor
    rho: Tensor | None
    reach: Tensor
    n_near: int
    message_columns: int
    alpha: float
    formula: Formula


# ----- the passes --------------------------------------------------------------------------------


def value(terms: AngleTerms, layer: AngleLayer) -> tuple[Tensor, Tensor | None]:
    """Pass 1: return m (slots, M) and a′ (angles, A); None for a′ if it is not wanted."""
    launch = Launch(terms, layer, PASS_1)
    out = launch.empty_outputs()
    push_kernel[launch.grid](out=out, dots=None, **launch.arguments)
    return add_parts(out.message)[0], out.a_new


def adjoint(cotangents: AngleCotangents, terms: AngleTerms, layer: AngleLayer) -> AngleTerms:
    """Pass 2: return the adjoints of the terms, each in the shape of its term."""
    launch = Launch(terms, layer)
    # The parts as first neighbour and those as second neighbour are added up together.
    parts_as_first = launch.n_blocks * launch.n_chunks
    parts_as_second = launch.n_groups * launch.n_chunks
    s_parts = launch.empty(parts_as_first + parts_as_second, *terms.s.shape)
    out = launch.empty_gradients()._replace(
        s_as_first=s_parts[:parts_as_first], s_as_second=s_parts[parts_as_first:]
    )
    pull_kernel[launch.grid](out=out, hats=cotangents, bars=None, dots=None, **launch.arguments)
    u_bar, t_bar, s_bar = add_parts(out.u, out.t, s_parts)
    return AngleTerms(a=out.a, u=u_bar, t=t_bar, s=s_bar)


def tangent(terms: AngleTerms, dots: AngleTerms, layer: AngleLayer) -> tuple[Tensor, Tensor | None]:
    """Pass 3: return the tangents of m and a′, which are the cotangents of their adjoints."""
    launch = Launch(terms, layer)
    out = launch.empty_outputs()
    push_kernel[launch.grid](out=out, dots=contiguous(dots), **launch.arguments)
    return add_parts(out.message)[0], out.a_new


def gradient(
    hats: AngleCotangents,
    bars: AngleCotangents | None,
    terms: AngleTerms,
    dots: AngleTerms | None,
    layer: AngleLayer,
) -> Tensors:
    """Pass 4: return the gradients of a, u, t, W and ρ; no elements for an absent ρ.

    `hats` are the cotangents of this pass, `bars` those of pass 2. `bars` and `dots` are None
    without forces.
    """
    launch = Launch(terms, layer)
    n_programs = math.prod(launch.grid)
    out = launch.empty_gradients()._replace(
        weight=launch.empty(n_programs, *launch.weight.shape),
        rho=launch.empty(n_programs, *launch.rho.shape),
    )
    pull_kernel[launch.grid](
        out=out,
        hats=hats,
        bars=bars,
        dots=contiguous(dots) if dots else None,
        # No prefetch of the next tile into shared memory; other passes have Triton's default.
        num_stages=1,
        **launch.arguments,
    )
    return out.a, *add_parts(out.u, out.t, out.weight, out.rho)


# ----- launches ----------------------------------------------------------------------------------

MAX_TILE_ROWS = 32  # second neighbours of a tile, at most
# Each group of an atom's first neighbours writes parts, which must be added up. `_count_groups` takes
# the fewest groups with which a launch takes at most this many times as long as with the best number.
SLACK = 1.1


class Tuning(NamedTuple):
    """How a pass is launched."""

    chunk_columns: int  # columns of y that a program holds at a time
    programs: int  # for each multiprocessor


# Pass 1 keeps less than the others: smaller chunks let more programs run at once.
PASS_1 = Tuning(chunk_columns=16, programs=8)
OTHER_PASSES = Tuning(chunk_columns=32, programs=4)


class Launch:
    """The grid of a pass over one layer's angles, the arguments of all passes, and outputs."""

    def __init__(self, terms: AngleTerms, layer: AngleLayer, tuning: Tuning = OTHER_PASSES) -> None:
        self.terms = contiguous(terms)
        self.layer = layer
        self.weight = layer.weight.contiguous()
        self.rho = self.weight.new_empty(0) if layer.rho is None else layer.rho.contiguous()
        A, Y = self.weight.shape
        n_near = layer.n_near
        n_atoms = self.terms.u.shape[0] // n_near
        tile_rows = min(MAX_TILE_ROWS, tile_side(n_near))
        self.n_blocks = triton.cdiv(n_near, tile_rows)
        self.n_chunks = triton.cdiv(Y, tuning.chunk_columns)
        n_programs = concurrent_programs(self.weight.device, tuning.programs)
        self.n_groups = _count_groups(n_atoms, n_near, n_programs)
        n_atom_programs = _count_atom_programs(n_atoms, self.n_groups, n_programs)
        self.grid = (n_atom_programs, self.n_groups, self.n_blocks)
        sizes = as_constexpr(
            Sizes(
                A=A,
                M=layer.message_columns,
                Y=Y,
                tile_rows=tile_rows,
                n_blocks=self.n_blocks,
                a_width=tile_side(A),
                chunk_columns=tuning.chunk_columns,
                n_chunks=self.n_chunks,
                dot_precision=dot_precision(),
            )
        )
        self.arguments: dict[str, Any] = {
            "weight": self.weight,
            "rho": self.rho,
            "reach": layer.reach,
            "terms": self.terms,
            "n_atoms": n_atoms,
            "n_near": n_near,
            "alpha": layer.alpha,
            "sizes": sizes,
            **layer.formula.kernel_arguments,
            "num_warps": tile_rows // MIN_DOT_SIDE,  # each multiplies 16 rows
        }

    def empty(self, *shape: int) -> Tensor:
        """Allocate an output of this shape."""
        return self.weight.new_empty(*shape)

    def empty_outputs(self) -> OutputParts:
        """Allocate what passes 1 and 3 write."""
        return OutputParts(
            message=self.empty(self.n_blocks, self.terms.u.shape[0], self.layer.message_columns),
            a_new=None if self.layer.rho is None else self.empty(*self.terms.a.shape),
        )

    def empty_gradients(self) -> GradientParts:
        """Allocate what passes 2 and 4 both write."""
        return GradientParts(
            a=self.empty(*self.terms.a.shape),
            u=self.empty(self.n_blocks, *self.terms.u.shape),
            t=self.empty(self.n_groups, *self.terms.t.shape),
        )


def _count_groups(n_atoms: int, n_near: int, n_programs: int) -> int:
    """Return G; `n_programs` run at once. B counts as 1, as with one block of neighbours."""

    def tiles_in_turn(n_groups: int) -> int:
        """Return how many tiles a program takes one after another."""
        n_atom_programs = _count_atom_programs(n_atoms, n_groups, n_programs)
        atoms_in_turn = triton.cdiv(n_atoms, n_atom_programs)
        return int(atoms_in_turn * triton.cdiv(n_near, n_groups))

    choices = range(1, n_near + 1)
    fewest = min(map(tiles_in_turn, choices))
    return next(n_groups for n_groups in choices if tiles_in_turn(n_groups) <= SLACK * fewest)


def _count_atom_programs(n_atoms: int, n_groups: int, n_programs: int) -> int:
    """Return P: the atoms are spread evenly over the least number of turns."""
    turns = triton.cdiv(n_atoms * n_groups, n_programs)
    return int(triton.cdiv(n_atoms, max(1, turns)))


# ----- arguments of the kernels ------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled; A, M and Y are those of the notation.

    Attributes
    ----------
    tile_rows, n_blocks
        Second neighbours in a tile, a power of two, and how many blocks hold all.
    a_width
        A power of two that holds A columns.
    chunk_columns, n_chunks
        Columns of a chunk, and how many chunks hold Y columns.
    dot_precision
        See `shared.dot_precision`.
    """

    A: tl.constexpr
    M: tl.constexpr
    Y: tl.constexpr
    tile_rows: tl.constexpr
    n_blocks: tl.constexpr
    a_width: tl.constexpr
    chunk_columns: tl.constexpr
    n_chunks: tl.constexpr
    dot_precision: tl.constexpr


class OutputParts(NamedTuple):
    """What passes 1 and 3 write: m and a′, or their tangents."""

    message: Any  # (blocks, slots, M): parts of m
    a_new: Any = None  # (angles, A); None if a′ is not wanted


class GradientParts(NamedTuple):
    """What passes 2 and 4 write."""

    a: Any  # (angles, A): â
    u: Any  # (blocks, slots, Y): parts of û
    t: Any  # (groups, slots, Y): parts of t̂
    s_as_first: Any = None  # (blocks·chunks, slots): parts of ŝ as first neighbour; pass 2 only
    s_as_second: Any = None  # (chunks·groups, slots): parts of ŝ as second neighbour; pass 2 only
    weight: Any = None  # (programs, A, Y): parts of Ŵ; pass 4 only
    rho: Any = None  # (programs, A): parts of ρ̂; pass 4 only


# ----- kernels -----------------------------------------------------------------------------------
# Sizes that differ between batches are not specialized: Triton would compile a kernel again for
# sizes that 16 divides, and again for 1.


@triton.jit(do_not_specialize=["n_atoms", "n_near"])
def push_kernel(
    out,  # OutputParts, written
    weight,  # (A, Y)
    rho,  # (A,)
    reach,  # (atoms,)
    terms,  # AngleTerms
    dots,  # AngleTerms: tangents; None in pass 1
    n_atoms,
    n_near,
    alpha,
    sizes,  # Sizes
    kind: tl.constexpr,  # `kind` and `curve_constants` are those of `curve`
    curve_constants: tl.constexpr,
) -> None:
    """Write m and a′ (pass 1), or their tangents (pass 3).

    y = f(z); m_j = s_j·Σ_k s_k·y_jk[:M], one part for each block, and a′ = α·a + ρ∘y[M:]. Their
    tangents are ẏ = f′(z)∘ż, ṁ_j = Σ_k (s_j·s_k·ẏ + (ṡ_j·s_k + s_j·ṡ_k)·y)[:M], ȧ′ = α·ȧ + ρ∘ẏ[M:].
    """
    block = _open_block(n_near, sizes)
    message_part = _part(out.message, block.number, n_atoms, n_near, sizes.M)
    for chunk_number in range(sizes.n_chunks):
        chunk = _load_chunk(weight, rho, chunk_number, block.i, sizes)
        a_new_mask = block.mask[:, None] & chunk.in_a[None, :]
        z_mask = block.mask[:, None] & chunk.in_y[None, :]
        for atom in range(tl.program_id(0), n_atoms, tl.num_programs(0)):
            slot_0 = _slot_0(atom, n_near)
            start, end, zeros_start = _first_neighbors(reach, atom, block, sizes)
            s_k = tl.load(terms.s + slot_0 + block.k, block.mask, 0.0)
            t_mask = z_mask & (start < end)  # nothing to load without a tile
            t = load_tile(terms.t, slot_0 + block.k, chunk.column, t_mask, sizes.Y)
            if dots is not None:
                s_k_dot = tl.load(dots.s + slot_0 + block.k, block.mask, 0.0)
                t_dot = load_tile(dots.t, slot_0 + block.k, chunk.column, t_mask, sizes.Y)
            for j in range(start, end, tl.num_programs(1)):
                slot = slot_0 + j
                angle = slot * n_near + block.k
                a = load_tile(terms.a, angle, block.i, block.a_mask, sizes.A)
                z = _pre_activation(terms, a=a, t=t, slot=slot, chunk=chunk, sizes=sizes)
                y, slope, _ = curve(z, kind, curve_constants)
                if dots is None:
                    m = tl.load(terms.s + slot) * tl.sum(y * s_k[:, None], 0)
                    y_out = y
                    a_in = terms.a
                else:
                    a_dot = load_tile(dots.a, angle, block.i, block.a_mask, sizes.A)
                    z_dot = _pre_activation(
                        dots, a=a_dot, t=t_dot, slot=slot, chunk=chunk, sizes=sizes
                    )
                    y_dot = slope * z_dot
                    s_j = tl.load(terms.s + slot)
                    s_pair = (s_j * s_k)[:, None]
                    s_pair_dot = (tl.load(dots.s + slot) * s_k + s_j * s_k_dot)[:, None]
                    m = tl.sum(y_dot * s_pair + y * s_pair_dot, 0)  # ṁ
                    y_out = y_dot
                    a_in = dots.a
                tl.store(message_part + slot * sizes.M + chunk.column, m, chunk.column < sizes.M)
                if sizes.Y > sizes.M:
                    a_old = load_tile(a_in, angle, chunk.a_column, a_new_mask, sizes.A)
                    at = out.a_new + angle[:, None] * sizes.A + chunk.a_column[None, :]
                    tl.store(at, alpha * a_old + chunk.rho * y_out, a_new_mask)
            _store_zeros(
                row_part=message_part,
                n_columns=sizes.M,
                a_out=out.a_new,
                slot_0=slot_0,
                zeros_start=zeros_start,
                n_near=n_near,
                block=block,
                column=chunk.column,
                chunk_number=chunk_number,
                sizes=sizes,
            )


@triton.jit(do_not_specialize=["n_atoms", "n_near"])
def pull_kernel(
    out,  # GradientParts, written
    hats,  # AngleCotangents of this pass: of the energy in pass 2, of the loss in pass 4
    bars,  # AngleCotangents of pass 2, for pass 4; None in pass 2, and without forces
    weight,  # (A, Y)
    rho,  # (A,)
    reach,  # (atoms,)
    terms,  # AngleTerms
    dots,  # AngleTerms: tangents; None in pass 2, and without forces
    n_atoms,
    n_near,
    alpha,
    sizes,  # Sizes
    kind: tl.constexpr,
    curve_constants: tl.constexpr,
) -> None:
    """Write â, û, t̂, and Ŵ and ρ̂ (pass 4) or ŝ (pass 2).

    ŷ = [s_j·s_k·m̂_j + (ṡ_j·s_k + s_j·ṡ_k)·m̄_j, ρ∘â′], ȳ = [s_j·s_k·m̄_j, ρ∘ā′];
    ẑ = f′(z)∘ŷ + f″(z)∘ż∘ȳ, z̄ = f′(z)∘ȳ;
    â = ẑ·Wᵀ + α·â′, û_j = Σ_k ẑ, t̂_k = Σ_j ẑ,
    Ŵ = Σ_angles (aᵀ·ẑ + ȧᵀ·z̄), ρ̂ = Σ_angles (y∘â′ + f′(z)∘ż∘ā′);
    ŝ_j = Σ_k s_k·(m̂_j·y_jk[:M]) as first and ŝ_k = Σ_j s_j·(m̂_j·y_jk[:M]) as second neighbour.
    Without bars and dots their terms are 0.
    """
    block = _open_block(n_near, sizes)
    group = tl.program_id(1)
    n_groups = tl.num_programs(1)
    u_part = _part(out.u, block.number, n_atoms, n_near, sizes.Y)
    for chunk_number in range(sizes.n_chunks):
        chunk = _load_chunk(weight, rho, chunk_number, block.i, sizes)
        a_new_mask = block.mask[:, None] & chunk.in_a[None, :]
        z_mask = block.mask[:, None] & chunk.in_y[None, :]
        if out.s_as_first is not None:
            s_number = block.number * sizes.n_chunks + chunk_number
            s_as_first_part = _part(out.s_as_first, s_number, n_atoms, n_near, 1)
        else:  # pass 4, with out.weight
            weight_hat = tl.zeros_like(chunk.weight)
            rho_hat = tl.zeros([sizes.chunk_columns], tl.float32)
        for atom in range(tl.program_id(0), n_atoms, tl.num_programs(0)):
            slot_0 = _slot_0(atom, n_near)
            start, end, zeros_start = _first_neighbors(reach, atom, block, sizes)
            s_k = tl.load(terms.s + slot_0 + block.k, block.mask, 0.0)
            t_mask = z_mask & (start < end)  # nothing to load without a tile
            t = load_tile(terms.t, slot_0 + block.k, chunk.column, t_mask, sizes.Y)
            if dots is not None:
                s_k_dot = tl.load(dots.s + slot_0 + block.k, block.mask, 0.0)
                t_dot = load_tile(dots.t, slot_0 + block.k, chunk.column, t_mask, sizes.Y)
            t_hat = tl.zeros_like(t)
            s_k_hat = tl.zeros_like(s_k)
            for j in range(start, end, n_groups):
                slot = slot_0 + j
                angle = slot * n_near + block.k
                a = load_tile(terms.a, angle, block.i, block.a_mask, sizes.A)
                z = _pre_activation(terms, a=a, t=t, slot=slot, chunk=chunk, sizes=sizes)
                y, slope, bend = curve(z, kind, curve_constants)
                s_j = tl.load(terms.s + slot)
                # Before ŷ: in another order the compiler spills more registers.
                if dots is not None:
                    s_pair_dot = (tl.load(dots.s + slot) * s_k + s_j * s_k_dot)[:, None]
                    a_dot = load_tile(dots.a, angle, block.i, block.a_mask, sizes.A)
                    z_dot = _pre_activation(
                        dots, a=a_dot, t=t_dot, slot=slot, chunk=chunk, sizes=sizes
                    )
                m_hat = _load_m_cotangent(hats.message, slot, chunk, sizes)
                if out.s_as_first is not None:
                    s_pair_hat = tl.sum(y * m_hat, 1)  # of s_j·s_k
                    tl.store(s_as_first_part + slot, tl.sum(s_pair_hat * s_k, 0))
                    s_k_hat += s_j * s_pair_hat
                s_pair = (s_j * s_k)[:, None]
                y_hat = m_hat * s_pair
                rho_terms = tl.zeros_like(y)  # the compiler drops them in pass 2
                if sizes.Y > sizes.M:
                    a_new_hat = load_tile(hats.a_new, angle, chunk.a_column, a_new_mask, sizes.A)
                    rho_terms += y * a_new_hat
                    y_hat += chunk.rho * a_new_hat
                if dots is not None:
                    m_bar = _load_m_cotangent(bars.message, slot, chunk, sizes)
                    y_hat += m_bar * s_pair_dot
                    y_bar = m_bar * s_pair
                    if sizes.Y > sizes.M:
                        a_new_bar = load_tile(
                            bars.a_new, angle, chunk.a_column, a_new_mask, sizes.A
                        )
                        rho_terms += slope * z_dot * a_new_bar
                        y_bar += chunk.rho * a_new_bar
                    z_hat = slope * y_hat + bend * z_dot * y_bar
                    z_bar = slope * y_bar
                else:
                    z_hat = slope * y_hat
                t_hat += z_hat
                tl.store(u_part + slot * sizes.Y + chunk.column, tl.sum(z_hat, 0), chunk.in_y)
                if out.weight is not None:
                    rho_hat += tl.sum(rho_terms, 0)
                    weight_hat += tl.dot(tl.trans(a), z_hat, input_precision=sizes.dot_precision)
                if dots is not None:  # only pass 4 has dots, and it has out.weight
                    weight_hat += tl.dot(
                        tl.trans(a_dot), z_bar, input_precision=sizes.dot_precision
                    )
                a_hat = tl.dot(z_hat, tl.trans(chunk.weight), input_precision=sizes.dot_precision)
                if sizes.Y > sizes.M:
                    first_mask = block.a_mask & (chunk_number == 0)  # α·â′ is added once
                    a_hat += alpha * load_tile(hats.a_new, angle, block.i, first_mask, sizes.A)
                _accumulate_a(
                    a_out=out.a,
                    value=a_hat,
                    angle=angle,
                    block=block,
                    chunk_number=chunk_number,
                    sizes=sizes,
                )
            _store_zeros(
                row_part=u_part,
                n_columns=sizes.Y,
                a_out=out.a,
                slot_0=slot_0,
                zeros_start=zeros_start,
                n_near=n_near,
                block=block,
                column=chunk.column,
                chunk_number=chunk_number,
                sizes=sizes,
            )
            row = group.to(tl.int64) * n_atoms + atom  # of parts as (groups·atoms, n_near, …)
            if out.s_as_second is not None:
                _store_zeros_of_s(s_as_first_part + slot_0, zeros_start, n_near)
                s_row = chunk_number * n_groups * n_atoms + row
                tl.store(out.s_as_second + s_row * n_near + block.k, s_k_hat, block.mask)
            t_at = out.t + (row * n_near + block.k)[:, None] * sizes.Y + chunk.column[None, :]
            tl.store(t_at, t_hat, z_mask)
        if out.weight is not None:
            # Of this program, as the flattened grid counts.
            program = (tl.program_id(0) * n_groups + group) * sizes.n_blocks + block.number
            _store_weight(
                out.weight, weight_hat, program=program, block=block, chunk=chunk, sizes=sizes
            )
            _store_rho(out.rho, rho_hat, program=program, chunk=chunk, sizes=sizes)
        # The next chunk adds to â. Other threads of this program may have written it.
        tl.debug_barrier()


# ----- blocks and chunks -------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A chunk of the columns of y, and these columns of W and ρ."""

    column: Any  # (chunk_columns,)
    in_y: Any  # (chunk_columns,): column < Y, since the last chunk may reach past Y
    a_column: Any  # (chunk_columns,): column − M, the column of a′ that it updates
    in_a: Any  # (chunk_columns,): M ≤ column < Y
    weight: Any  # (a_width, chunk_columns)
    rho: Any  # (1, chunk_columns); 0 in columns of the message


class Block(NamedTuple):
    """The block of second neighbours that a program takes."""

    number: Any
    k: Any  # (tile_rows,)
    mask: Any  # (tile_rows,): k < n_near
    i: Any  # (a_width,): all columns of a
    a_mask: Any  # (tile_rows, a_width): i < A too


@triton.jit
def _open_block(n_near, sizes):
    """Return the block of a program."""
    number = tl.zeros([], tl.int32)  # not 0: callers need a tensor, to convert it to int64
    if sizes.n_blocks > 1:
        # The last block, which few atoms reach, comes first: its programs run next to those that
        # have more to do.
        number += sizes.n_blocks - 1 - tl.program_id(2)
    k = number * sizes.tile_rows + tl.arange(0, sizes.tile_rows)
    i = tl.arange(0, sizes.a_width)
    mask = k < n_near
    a_mask = mask[:, None] & (i < sizes.A)[None, :]
    return Block(number=number, k=k, mask=mask, i=i, a_mask=a_mask)


@triton.jit
def _slot_0(atom, n_near):
    """Return the slot of an atom's neighbour 0 (int64: angles · columns may exceed 2³¹)."""
    return atom * tl.full([], n_near, tl.int64)


@triton.jit
def _first_neighbors(reach, atom, block, sizes):
    """Return `start`, `end` and `zeros_start`: the two ranges of a program's first neighbours.

    With G groups the program computes the tiles of start, start + G, … below `end`. It stores zeros
    for zeros_start, zeros_start + G, … below `n_near`.
    """
    n_within = tl.load(reach + atom)
    # If no second neighbour of the block is within reach, nor is any tile.
    end = tl.where(n_within > block.number * sizes.tile_rows, n_within, 0)
    start = tl.program_id(1)
    step = tl.num_programs(1)
    n_computed = (tl.maximum(end - start, 0) + step - 1) // step
    return start, end, start + n_computed * step


@triton.jit
def _load_chunk(weight, rho, chunk_number, i, sizes):
    column = chunk_number * sizes.chunk_columns + tl.arange(0, sizes.chunk_columns)
    in_y = column < sizes.Y
    a_column = column - sizes.M
    in_a = (column >= sizes.M) & in_y
    weight_mask = (i < sizes.A)[:, None] & in_y[None, :]
    return Chunk(
        column=column,
        in_y=in_y,
        a_column=a_column,
        in_a=in_a,
        weight=load_tile(weight, i, column, weight_mask, sizes.Y),
        rho=tl.load(rho + a_column, in_a, 0.0)[None, :],
    )


# ----- tensors of a tile -------------------------------------------------------------------------


@triton.jit
def _part(parts, number, n_atoms, n_near, n_columns: tl.constexpr):
    """Return a pointer to a part (atoms·n_near, n_columns)."""
    return parts + number.to(tl.int64) * n_atoms * n_near * n_columns


@triton.jit
def _pre_activation(terms, a, t, slot, chunk, sizes):
    """Return a chunk of z = a·W + u_j + t_k (tile_rows, chunk_columns), or of ż from tangents.

    What does not depend on positions, such as a bias, must not be added here: ż has none.
    """
    u = tl.load(terms.u + slot * sizes.Y + chunk.column, chunk.in_y, 0.0)
    return tl.dot(a, chunk.weight, input_precision=sizes.dot_precision) + u[None, :] + t


@triton.jit
def _load_m_cotangent(message, slot, chunk, sizes):
    """Load m̂_j or m̄_j into the columns of y (1, chunk_columns); 0 beyond M."""
    in_message = chunk.column < sizes.M
    return tl.load(message + slot * sizes.M + chunk.column, in_message, 0.0)[None, :]


@triton.jit
def _accumulate_a(a_out, value, angle, block, chunk_number, sizes):
    """Store what a chunk of y contributes to â, added to that of earlier chunks."""
    # The first chunk must not read: the memory is not initialized.
    value += load_tile(a_out, angle, block.i, block.a_mask & (chunk_number > 0), sizes.A)
    tl.store(a_out + angle[:, None] * sizes.A + block.i[None, :], value, block.a_mask)


@triton.jit
def _store_weight(weight_parts, value, program, block, chunk, sizes):
    """Store a program's part of Ŵ in the columns of a chunk."""
    row = (program * sizes.A + block.i[:, None]) * sizes.Y
    mask = (block.i < sizes.A)[:, None] & chunk.in_y[None, :]
    tl.store(weight_parts + row + chunk.column[None, :], value, mask)


@triton.jit
def _store_rho(rho_parts, value, program, chunk, sizes):
    """Store a program's part of ρ̂ in the columns of a chunk."""
    if sizes.Y > sizes.M:
        tl.store(rho_parts + program * sizes.A + chunk.a_column, value, chunk.in_a)


@triton.jit
def _store_zeros(
    row_part,  # (slots, n_columns), written: m or û
    n_columns: tl.constexpr,
    a_out,  # (angles, A), written with the first chunk: a′ or â; None if a′ is not wanted
    slot_0,
    zeros_start,
    n_near,
    block,
    column,  # (chunk_columns,)
    chunk_number,
    sizes,
):
    """Store zeros for the first neighbours that a program does not compute."""
    for j in range(zeros_start, n_near, tl.num_programs(1)):
        slot = slot_0 + j
        zero_row = tl.zeros([sizes.chunk_columns], tl.float32)
        tl.store(row_part + slot * n_columns + column, zero_row, column < n_columns)
        if a_out is not None:
            angle = slot * n_near + block.k
            zeros = tl.zeros([sizes.tile_rows, sizes.a_width], tl.float32)
            at = a_out + angle[:, None] * sizes.A + block.i[None, :]
            tl.store(at, zeros, block.a_mask & (chunk_number == 0))


@triton.jit
def _store_zeros_of_s(s_of_atom, zeros_start, n_near):
    for j in range(zeros_start, n_near, tl.num_programs(1)):
        tl.store(s_of_atom + j, 0.0)
