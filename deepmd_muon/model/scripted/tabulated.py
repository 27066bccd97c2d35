"""Descriptors with tables in place of their embedding nets: those of compressed files.

The features G of a pair of types are functions of s = switch(r)/(r + protection) of an edge, as in
`se_e2_a` and in DPA-1 without attention. If DPA-1 switches the influence of types off at the
cut-off, G = G₀(s) + switch(r)·G₁(s), with a table for each channel. A table is a quintic B-spline
on equal intervals, G(s) = Σ_k b_k(s) C_k, where b_k differs from 0 on six intervals (de Boor, A
Practical Guide to Splines). On interval number `cell`, these are the b_k from k = cell to cell + 5.
The descriptor needs only sums over edges, so that no feature of an edge is formed, as in the
`interpolation` of training steps:

    A_i = Σ_e R_e ⊗ G(s_e) = B_i·C,   B_i[c, k] = Σ_e R_e[c] b_k(s_e)
    dE/dR_e[c] = Σ_k b_k(s_e) P_i[c, k],   P_i = Ā_i·Cᵀ
    dE/ds_e = Σ_ck R_e[c] b′_k(s_e) P_i[c, k].

B has a group of numbers (4, channels, terms) for each centre and neighbour type, with as many terms
k as edges reach. The net's argument is R₀, which is s standardised.

The net itself is evaluated for edges beyond the table, so that energy and forces are those of the
model at any distance.

Training steps interpolate by Chebyshev series instead, because each scheme is slow at the other's
task (measured 2026-11-27, torch 2.13, one CPU core):

- An edge adds to 6 coefficients of a spline, but to 16 of a series. For 23,808 edges in float32,
  the sums took 0.9 and 3.4 ms, the way back 0.7 and 2.2; in float64 1.3 and 6.6, 1.0 and 4.8.
- A series needs fewer coefficients, because its pieces adapt to the net. Within the tolerance of
  training steps, nets of water (25, 50, 100 neurons; 6,000 steps on the data of
  `examples/water_xtb`) took 512 in float64 and 256 in float32, splines 2,133 and 853. The products
  of an atom and the evaluations of the net grow alike.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.scripted.dense import Dense, product
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.rows import quintic, sums_pullback

MARGIN = 40
"""Samples on each side that a coefficient depends on: weights fall by 0.43 a sample, to 2e-15."""

MOST_BYTES = 2**28
"""Size of the largest table."""

# ----- splines ------------------------------------------------------------------------------------


def spline_matrix() -> Tensor:
    """Return the six b on an interval as polynomials of u ∈ [0, 1): b_k = Σ_n matrix[k, n]·uⁿ."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    # b^n_k(u) = ((u + n − k) b^(n−1)_(k−1) + (k + 1 − u) b^(n−1)_k) / n
    for degree in range(1, 6):
        higher = torch.zeros(degree + 1, degree + 1, dtype=torch.float64)
        for k in range(degree + 1):
            if k > 0:
                higher[k, :degree] += (degree - k) * matrix[k - 1]
                higher[k, 1:] += matrix[k - 1]
            if k < degree:
                higher[k, :degree] += (k + 1) * matrix[k]
                higher[k, 1:] -= matrix[k]
        matrix = higher / degree
    return matrix


def spline_coefficients(features: Callable[[Tensor], Tensor], step: float, pieces: int) -> Tensor:
    """Return C `(pieces + 5, M)`, float64, of features `(n, M)` on [0, pieces·step].

    A spline that passes through samples on an infinite grid is their convolution with the inverse
    of (1, 26, 66, 26, 1)/120, the values of b at its knots.
    """
    size = 4 * MARGIN + 1
    system = torch.zeros(size, size, dtype=torch.float64)
    for offset, weight in ((-2, 1.0), (-1, 26.0), (0, 66.0), (1, 26.0), (2, 1.0)):
        diagonal = torch.full([size - abs(offset)], weight / 120.0, dtype=torch.float64)
        system += torch.diag(diagonal, offset)
    inverse = torch.linalg.inv(system)[2 * MARGIN, MARGIN : size - MARGIN]
    knots = torch.arange(pieces + 5 + 2 * MARGIN, dtype=torch.float64) - 2 - MARGIN
    samples = features(knots * step)
    coefficients: Tensor = samples.unfold(0, 2 * MARGIN + 1, 1) @ inverse
    return coefficients


def double(layer: Dense) -> Dense:
    """Return a layer in float64, in which all nets are tabulated: so slopes have no noise."""
    return Dense(
        matrix=layer.matrix.double(),
        bias=layer.bias.double(),
        idt=None if layer.idt is None else layer.idt.double(),
        copies=layer.copies,
    )


# ----- what the descriptor passes on to its pullback ----------------------------------------------


class Geometry(NamedTuple):
    """Edge vectors and functions of their lengths; edges are flattened, components come first.

    Attributes
    ----------
    vectors
        r_ij `(3, nedges)` [Å].
    s
        switch(r)/(r + protection) `(nedges,)`.
    isotropic, radial, bend
        See `environment` `(nedges,)`.
    switch
        `(nedges,)`.
    switch_slope
        Its derivative by r, divided by r `(nedges,)`.
    """

    vectors: Tensor
    s: Tensor
    isotropic: Tensor
    radial: Tensor
    bend: Tensor
    switch: Tensor
    switch_slope: Tensor


class Basis(NamedTuple):
    """The six splines that differ from 0 at each edge.

    Attributes
    ----------
    values, slopes
        b_k and b′_k `(6, nedges)`; 0 beyond the table.
    cell
        k of the first `(nedges,)`.
    is_beyond
        Whether the edge is beyond the table `(nedges,)`.
    """

    values: Tensor
    slopes: Tensor
    cell: Tensor
    is_beyond: Tensor


class Tape(NamedTuple):
    """Values that the pullback needs.

    Attributes
    ----------
    geometry, basis
        See there.
    rows, scale
        R, and dR/drow `(4, nedges)`.
    switch
        Factor of the second channel `(nedges,)`, in the dtype of the table; empty with one channel.
    offset
        Index in the flat B of component 0, channel 0, k = `cell` of the edge's group `(nedges,)`.
    beyond, exact
        Numbers of the edges beyond the table `(n,)`; their G, dG/dR₀ and, with two channels,
        dG/dswitch `(2 or 3, n, M)`.
    kinds
        The types among the neighbours, for which B has blocks.
    counts
        Number of centres of each type.
    terms
        Leading coefficients of each table that edges reach: a larger k is a shorter distance.
    a
        A/slots, with the edges beyond the table and empty slots `(ncentre, 4, M)`.
    """

    geometry: Geometry
    basis: Basis
    rows: Tensor
    scale: Tensor
    switch: Tensor
    offset: Tensor
    beyond: Tensor
    exact: Tensor
    kinds: list[int]
    counts: list[int]
    terms: int
    a: Tensor


# ----- the descriptor -----------------------------------------------------------------------------


class Tabulated(torch.nn.Module):
    """Descriptor of a compressed file; see the module and `deepmd_muon.model.scripted.interface`.

    A subclass defines the features of the nets, and replaces defaults of what they read.

    Parameters
    ----------
    scripted
        The scripted descriptor with its nets.
    empty_row
        R of an empty slot of each type `(ntypes, 4)`.
    step
        Length of an interval in the input of the net, (s − mean)/deviation.
    nearest
        Distance where the table ends [Å].

    Raises
    ------
    ModelError
        When the table would be too large.
    """

    request: Request
    rcut: float
    rcut_smth: float
    protection: float
    slots: int
    axis: int
    width: int  # M
    step: float  # length of an interval in units of s; the argument is in those of R₀
    pieces: int  # intervals
    channels: int  # 1 or 2
    fills: bool  # whether empty slots contribute to A
    excludes: bool  # whether some pairs of types do not see each other
    warned: bool
    scale: Tensor  # 1/stddev (ntypes, 4)
    empty_row: Tensor  # (ntypes, 4)
    seen: Tensor  # false for excluded pairs (centre, neighbour)
    table: Tensor  # C (centre·ntypes + neighbour, channels, pieces + 5, M)
    polynomials: Tensor  # b and b′ as coefficients of powers of u (12, 6)
    type_rows: Tensor  # appended to D, for each type (ntypes, n)

    def __init__(self, scripted: Any, empty_row: Tensor, *, step: float, nearest: float) -> None:
        super().__init__()
        self.request = scripted.request
        self.rcut = scripted.rcut
        self.rcut_smth = scripted.rcut_smth
        self.protection = scripted.protection
        self.slots = scripted.slots
        self.axis = scripted.axis
        self.width = scripted.width
        self.warned = False
        self.register_buffer("scale", scripted.scale.clone())
        self.register_buffer("empty_row", empty_row.clone())
        self.fills = bool((empty_row != 0).any())
        self.channels = self.channels_of(scripted)
        self.excludes = False
        ntypes = self.request.ntypes
        self.register_buffer("seen", torch.ones(ntypes, ntypes, dtype=torch.bool))
        self.register_buffer("type_rows", self.scale.new_zeros(ntypes, 0))
        # From units of R₀ to those of s.
        self.step = step / float(self.scale[:, 0].max())
        # Rounded up; the largest s in the table is 1/(nearest + protection).
        self.pieces = max(1, int(-(-1.0 // ((nearest + self.protection) * self.step))))
        self._check_size()
        pairs = [
            self._coefficients(scripted, centre, neighbor_kind)
            for centre in range(ntypes)
            for neighbor_kind in range(ntypes)
        ]
        self.register_buffer("table", torch.stack(pairs).to(self.scale.dtype))
        matrix = spline_matrix()
        slope = torch.zeros_like(matrix)
        slope[:, :5] = matrix[:, 1:] * torch.arange(1, 6) / self.step
        self.register_buffer("polynomials", torch.cat([matrix, slope]).to(self.scale.dtype))

    def _check_size(self) -> None:
        ntypes = self.request.ntypes
        numbers = self.channels * ntypes**2 * (self.pieces + 5) * self.width
        size = numbers * self.scale.element_size()
        if size > MOST_BYTES:
            raise ModelError(
                f"the tables of {ntypes}² pairs of types would take {size / 2**20:.0f} MiB, more "
                f"than {MOST_BYTES / 2**20:.0f}: take a longer step or a smaller extrapolation"
            )

    @torch.no_grad()
    def _coefficients(self, scripted: Any, centre_kind: int, neighbor_kind: int) -> Tensor:
        """Return the tables of a pair of types `(channels, pieces + 5, M)`."""
        scale = self.scale[centre_kind, 0].double()
        shift = self.empty_row[centre_kind, 0].double()
        features = self.features_of(scripted, centre_kind, neighbor_kind)

        def features_of_s(s: Tensor) -> Tensor:
            return features(s * scale + shift)

        all_channels = spline_coefficients(features_of_s, self.step, self.pieces)
        return all_channels.view(-1, self.channels, self.width).transpose(0, 1)

    @staticmethod
    def channels_of(scripted: Any) -> int:
        """Return how many tables a pair of types has."""
        raise NotImplementedError

    @staticmethod
    def features_of(scripted: Any, centre: int, neighbor_kind: int) -> Callable[[Tensor], Tensor]:
        """Return a function of R₀: features of a pair of types `(n, channels·M)`, float64."""
        raise NotImplementedError

    def embed_exactly(self, x: Tensor, pair: Tensor, switch: Tensor) -> Tensor:
        """Return G, dG/dR₀ and, with two channels, dG/dswitch `(2 or 3, n, M)`.

        Parameters
        ----------
        x
            R₀ `(n,)`.
        pair
            centre·ntypes + neighbour `(n,)`.
        switch
            Of the edges `(n,)`; empty with one channel.
        """
        raise NotImplementedError

    def fill(self, near: Near, neighbor_kind: Tensor, real: Tensor) -> Tensor:
        """Return the part of empty slots in A `(ncentre, 4, M)`.

        Parameters
        ----------
        near
            The neighbourhoods.
        neighbor_kind
            Types of the neighbours `(ncentre, nnei)`.
        real
            Which slots hold one `(ncentre, nnei)`.
        """
        raise NotImplementedError

    @torch.jit.export
    def describe(self, near: Near) -> tuple[Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        ncentre, nnei = near.neighbor.shape
        dtype = self.table.dtype
        real = near.neighbor >= 0
        neighbor_kind = near.types[near.neighbor.clamp(min=0)].clamp(min=0)
        used = real
        if self.excludes:
            used = real & self.seen[near.kind.unsqueeze(1), neighbor_kind]

        geometry = self._geometry(near.vectors, real)
        scale = self.scale.t()[:, near.kind].unsqueeze(2) * used
        empty = self.empty_row.t()[:, near.kind].unsqueeze(2) * used
        rows = torch.cat([geometry.s.unsqueeze(0), geometry.isotropic * geometry.vectors])
        rows = (rows.view(4, ncentre, nnei).to(dtype) * scale + empty).view(4, -1)
        switch = geometry.s.new_zeros([0], dtype=dtype)
        if self.channels > 1:
            switch = geometry.switch.to(dtype)

        basis = self._basis(geometry.s)
        terms = 6 if basis.cell.numel() == 0 else int(basis.cell.max()) + 6
        kinds, group = self._groups(neighbor_kind, real)
        offset = (group * (4 * self.channels * terms)).view(-1) + basis.cell
        b = self._expand(
            rows, basis.values, switch, offset, groups=len(kinds) * ncentre, terms=terms
        )
        a = self._contract(b, kinds, near)

        beyond = (basis.is_beyond & used.view(-1)).nonzero().view(-1)
        exact = torch.zeros(
            [1 + self.channels, beyond.shape[0], self.width], dtype=dtype, device=rows.device
        )
        if beyond.shape[0] > 0:
            self._warn_once()
            pair = (near.kind.unsqueeze(1) * self.request.ntypes + neighbor_kind).view(-1)
            beyond_switch = switch[beyond] if self.channels > 1 else switch
            exact = self.embed_exactly(rows[0, beyond], pair[beyond], beyond_switch)
            products = rows[:, beyond].t().unsqueeze(2) * exact[0].unsqueeze(1)
            a.index_add_(0, beyond // nnei, products)  # the atom of each edge
        if self.fills:
            a = a + self.fill(near, neighbor_kind, real)
        a = a / self.slots
        d = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        if self.type_rows.shape[1] > 0:
            d = torch.cat([d, self.type_rows[near.kind]], dim=1)
        tape = Tape(
            geometry=geometry,
            basis=basis,
            rows=rows,
            scale=scale.view(4, -1),
            switch=switch,
            offset=offset,
            beyond=beyond,
            exact=exact,
            kinds=kinds,
            counts=near.counts,
            terms=terms,
            a=a,
        )
        return d, tape

    def _geometry(self, vectors: Tensor, real: Tensor) -> Geometry:
        """Return the geometry of r_ij `(ncentre, nnei, 3)`; everything vanishes in empty slots."""
        vectors = vectors.masked_fill(~real.unsqueeze(2), self.rcut).view(-1, 3).t().contiguous()
        distance = (vectors * vectors).sum(0).sqrt_()
        v = ((self.rcut - distance) / (self.rcut - self.rcut_smth)).clamp_(0.0, 1.0)
        switch = -quintic(v)  # without cancellation at the cut-off
        t = 1.0 / (distance + self.protection)
        slope = (v * (v - 1.0)).square_().mul_(-30.0 / (self.rcut - self.rcut_smth))
        slope_t = slope * t
        isotropic = switch * t * t
        return Geometry(
            vectors=vectors,
            s=switch * t,
            isotropic=isotropic,
            radial=(slope_t - isotropic) / distance,
            bend=(slope_t - 2.0 * isotropic) * t / distance,
            switch=switch,
            switch_slope=slope / distance,
        )

    def _basis(self, s: Tensor) -> Basis:
        """Return the splines at each s."""
        steps = (s / self.step).clamp_(max=float(self.pieces))
        cell = steps.floor().clamp_(0.0, float(self.pieces - 1))
        u = (steps - cell).to(self.table.dtype)
        square = u * u
        cube = square * u
        powers = torch.stack([torch.ones_like(u), u, square, cube, square * square, cube * square])
        is_beyond = s > self.pieces * self.step
        values_and_slopes = product(self.polynomials, powers) * ~is_beyond
        return Basis(
            values=values_and_slopes[:6],
            slopes=values_and_slopes[6:],
            cell=cell.masked_fill_(is_beyond, 0.0).to(torch.int64),
            is_beyond=is_beyond,
        )

    def _warn_once(self) -> None:
        """Warn that atoms are closer than the table reaches."""
        if not self.warned:
            self.warned = True
            nearest = 1.0 / (self.pieces * self.step) - self.protection
            warnings.warn(
                f"two atoms are closer than {nearest} Angstrom, where this compressed potential's "
                f"tables end: its nets "
                "are evaluated there, and training data have hardly shown them such distances",
                stacklevel=2,
            )

    def _groups(self, neighbor_kind: Tensor, real: Tensor) -> tuple[list[int], Tensor]:
        """Return the types among the neighbours, and the group in B of each edge `(ncentre, nnei)`.

        Groups are in blocks: one block for each of these types, with all centres.
        """
        kinds: list[int] = []
        block = torch.zeros([self.request.ntypes], dtype=torch.int64, device=real.device)
        n_edges: list[int] = (
            torch.bincount(neighbor_kind[real], minlength=self.request.ntypes).cpu().tolist()
        )
        for kind in range(len(n_edges)):
            if n_edges[kind] > 0:
                block[kind] = len(kinds)
                kinds.append(kind)
        ncentre = real.shape[0]
        centre = torch.arange(ncentre, device=real.device).unsqueeze(1)
        return kinds, block[neighbor_kind] * ncentre + centre

    def _expand(
        self,
        rows: Tensor,
        values: Tensor,
        switch: Tensor,
        offset: Tensor,
        groups: int,
        terms: int,
    ) -> Tensor:
        """Return B `(groups, 4, channels·terms)`; the second channel has the switch as a factor."""
        out = torch.zeros(
            [groups * 4 * self.channels * terms], dtype=rows.dtype, device=rows.device
        )
        for c in range(4):
            products = rows[c] * values
            for channel in range(self.channels):
                if channel > 0:
                    products = products * switch
                start = (c * self.channels + channel) * terms
                for k in range(6):
                    out.index_add_(0, offset + (start + k), products[k])
        return out.view(groups, 4, self.channels * terms)

    def _contract(self, b: Tensor, kinds: list[int], near: Near) -> Tensor:
        """Return A = Σ B·C `(ncentre, 4, M)`, without empty slots and edges beyond the table."""
        ncentre = near.kind.shape[0]
        n_terms = b.shape[2]
        a = torch.zeros([ncentre * 4, self.width], dtype=b.dtype, device=b.device)
        for block in range(len(kinds)):
            block_b = b[block * ncentre : (block + 1) * ncentre].view(-1, n_terms)
            start = 0  # centres are sorted by type
            for centre_kind in range(len(near.counts)):
                stop = start + 4 * near.counts[centre_kind]
                c = self._pair_table(centre_kind, kinds[block], n_terms // self.channels)
                a[start:stop] += product(block_b[start:stop], c)
                start = stop
        return a.view(ncentre, 4, self.width)

    def _pair_table(self, centre_kind: int, neighbor_kind: int, terms: int) -> Tensor:
        """Return C of a pair of types, its first `terms` coefficients `(channels·terms, M)`."""
        pair = centre_kind * self.request.ntypes + neighbor_kind
        return self.table[pair, :, :terms].reshape(-1, self.width)

    @torch.jit.export
    def pullback(self, adjoint: Tensor, tape: Tape) -> Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        a_bar = sums_pullback(adjoint, tape.a, self.axis, self.slots)
        rows_bar, s_bar, switch_bar = self._evaluate(self._pull_contraction(a_bar, tape), tape)
        if tape.beyond.shape[0] > 0:
            self._replace_beyond(a_bar, tape, rows_bar, switch_bar)
        geometry = tape.geometry
        rows_bar = (rows_bar * tape.scale).to(geometry.s.dtype)  # dE/drow
        along = (rows_bar[1:] * geometry.vectors).sum(0)
        # s is row₀: dE/ds has the same factor as dE/drow₀.
        radial = geometry.radial * (rows_bar[0] + s_bar) + geometry.bend * along
        if self.channels > 1:
            radial = radial + geometry.switch_slope * switch_bar
        out = geometry.isotropic * rows_bar[1:] + radial * geometry.vectors
        return out.t().reshape(tape.a.shape[0], -1, 3)

    def _pull_contraction(self, a_bar: Tensor, tape: Tape) -> Tensor:
        """Return P = Ā·Cᵀ, flat, in the order of B."""
        flat = a_bar.view(-1, self.width)
        out = torch.empty(
            [len(tape.kinds), flat.shape[0], self.channels * tape.terms],
            dtype=flat.dtype,
            device=flat.device,
        )
        for block in range(len(tape.kinds)):
            start = 0
            for centre_kind in range(len(tape.counts)):
                stop = start + 4 * tape.counts[centre_kind]
                c = self._pair_table(centre_kind, tape.kinds[block], tape.terms)
                out[block, start:stop] = product(flat[start:stop], c.t())
                start = stop
        return out.view(-1)

    def _evaluate(self, p: Tensor, tape: Tape) -> tuple[Tensor, Tensor, Tensor]:
        """Return dE/dR `(4, nedges)`, dE/ds through b `(nedges,)`, and dE/dswitch, 0 beyond.

        `p` is flat, in the order of B.
        """
        rows_bar = torch.zeros_like(tape.rows)
        s_bar = torch.zeros_like(tape.rows[0])
        switch_bar = torch.zeros_like(tape.switch)
        for c in range(4):
            for channel in range(self.channels):
                value = torch.zeros_like(s_bar)
                slope = torch.zeros_like(s_bar)
                start = (c * self.channels + channel) * tape.terms
                for k in range(6):
                    coefficients = p.index_select(0, tape.offset + (start + k))
                    value.addcmul_(coefficients, tape.basis.values[k])
                    slope.addcmul_(coefficients, tape.basis.slopes[k])
                if channel > 0:
                    switch_bar.addcmul_(value, tape.rows[c])
                    value = value * tape.switch
                    slope = slope * tape.switch
                rows_bar[c] += value
                s_bar.addcmul_(slope, tape.rows[c])
        return rows_bar, s_bar, switch_bar

    def _replace_beyond(
        self, a_bar: Tensor, tape: Tape, rows_bar: Tensor, switch_bar: Tensor
    ) -> None:
        """Write dE/dR, and dE/dswitch, of the edges beyond the table from the net's values."""
        nnei = tape.offset.shape[0] // a_bar.shape[0]
        products = torch.bmm(a_bar[tape.beyond // nnei], tape.exact.permute(1, 2, 0))
        products = products.permute(2, 1, 0)  # Ā·G, Ā·dG/dR₀ and Ā·dG/dswitch (2 or 3, 4, n)
        rows = tape.rows[:, tape.beyond]
        exact_bar = products[0].contiguous()
        exact_bar[0] += (products[1] * rows).sum(0)
        rows_bar.index_copy_(1, tape.beyond, exact_bar)
        if self.channels > 1:
            switch_bar.index_copy_(0, tape.beyond, (products[2] * rows).sum(0))
