"""Descriptors with tables in place of their embedding nets, for TorchScript: those of compressed files.

The features G of a pair of types are functions of s = switch(r)/r of an edge, as in `se_e2_a` and in DPA-1 without
attention; where DPA-1 switches the influence of types off at the cut-off, G = G₀(s) + switch(r)·G₁(s), with a table for
each channel. A table is a quintic B-spline on equal intervals, G(s) = Σ_k b_k(s) C_k, where b_k differs from 0 on six
intervals (de Boor, A Practical Guide to Splines). The descriptor needs only sums over edges, so that no feature of an
edge is formed, as in the training step's `interpolation`:

    A_i = Σ_e R_e ⊗ G(s_e) = B_i·C,   B_i[c, k] = Σ_e R_e[c] b_k(s_e)
    dE/dR_e[c] = Σ_k b_k(s_e) P_i[c, k],   dE/ds_e = Σ_ck R_e[c] b′_k(s_e) P_i[c, k],   P_i = Ā_i·Cᵀ.

Neighbouring intervals share their coefficients: C has one row an interval, piecewise polynomials have six. The net
itself is evaluated for edges beyond the table, so that energy and forces stay those of the model at any distance.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepmd_muon.model.descriptor.environment import quintic
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.scripted.dense import Dense, product
from deepmd_muon.model.scripted.near import Near, Request
from deepmd_muon.model.scripted.rows import sums_pullback

MARGIN = 40
"""Samples on each side that a coefficient depends on: their weights fall by 0.43 a sample, to 2e-15."""

MOST_BYTES = 2**28
"""Largest table."""


class Tape(NamedTuple):
    """Values that the pullback needs; edges are flattened, components come first.

    Attributes
    ----------
    vectors, geometry, rows, scale
        r_ij `(3, nedges)` [Å]; `_geometry`; R and its factor `(4, nedges)`.
    switch
        Factor of the second channel `(nedges,)`; empty where there is one.
    values, slopes
        b_k and b′_k of the six intervals `(6, nedges)`; 0 beyond the table.
    place
        Where the six begin in B `(nedges,)`.
    beyond, exact
        Edges beyond the table `(n,)`, their G, dG/dR₀ and, with two channels, dG/dswitch `(2 or 3, n, M)`.
    kinds, counts, terms
        Types among the neighbours, number of centres of each type, rows of each C that are used.
    a
        A `(ncentre, 4, M)`.
    """

    vectors: torch.Tensor
    geometry: torch.Tensor
    rows: torch.Tensor
    scale: torch.Tensor
    switch: torch.Tensor
    values: torch.Tensor
    slopes: torch.Tensor
    place: torch.Tensor
    beyond: torch.Tensor
    exact: torch.Tensor
    kinds: list[int]
    counts: list[int]
    terms: int
    a: torch.Tensor


def spline_matrix() -> torch.Tensor:
    """Return the polynomials of b_j … b_j+5 on an interval: coefficients of u⁰ … u⁵ `(6, 6)`, row for each b."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for degree in range(1, 6):  # b^n_k(u) = ((u + n − k) b^(n−1)_(k−1) + (k + 1 − u) b^(n−1)_k) / n
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


def spline_coefficients(
    features: Callable[[torch.Tensor], torch.Tensor], step: float, pieces: int
) -> torch.Tensor:
    """Return C `(pieces + 5, M)`, float64, of features `(n, M)` on [0, pieces·step].

    A spline that passes through samples on an infinite grid is their convolution with the inverse of (1, 26, 66, 26,
    1)/120, the values of b at its knots.
    """
    size = 4 * MARGIN + 1
    system = torch.zeros(size, size, dtype=torch.float64)
    for offset, weight in ((-2, 1.0), (-1, 26.0), (0, 66.0), (1, 26.0), (2, 1.0)):
        system += torch.diag(
            torch.full([size - abs(offset)], weight / 120.0, dtype=torch.float64), offset
        )
    inverse = torch.linalg.inv(system)[2 * MARGIN, MARGIN : size - MARGIN]
    samples = features(
        (torch.arange(pieces + 5 + 2 * MARGIN, dtype=torch.float64) - 2 - MARGIN) * step
    )
    coefficients: torch.Tensor = samples.unfold(0, 2 * MARGIN + 1, 1) @ inverse
    return coefficients


def double(layer: Dense) -> Dense:
    """Return a layer in float64: a float32 net is tabulated there, so that slopes have no noise."""
    return Dense(
        layer.matrix.double(),
        layer.bias.double(),
        None if layer.idt is None else layer.idt.double(),
        layer.copies,
    )


class Tabulated(torch.nn.Module):
    """Descriptor of a compressed file; see the module and `deepmd_muon.model.scripted.interface`.

    A subclass gives the features of the nets; `own` is the descriptor that has them.

    Parameters
    ----------
    own
        The descriptor with its nets.
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
    width: int
    step: float
    pieces: int
    channels: int
    fills: bool
    excludes: bool
    told: bool
    scale: torch.Tensor
    empty_row: torch.Tensor
    seen: torch.Tensor
    table: torch.Tensor
    basis: torch.Tensor
    type_rows: torch.Tensor

    def __init__(self, own: Any, empty_row: torch.Tensor, *, step: float, nearest: float) -> None:
        super().__init__()
        self.request, self.rcut, self.rcut_smth, self.protection = (
            own.request,
            own.rcut,
            own.rcut_smth,
            own.protection,
        )
        self.slots, self.axis, self.width, self.told = own.slots, own.axis, own.width, False
        self.register_buffer("scale", own.scale.clone())
        self.register_buffer("empty_row", empty_row.clone())
        self.fills = bool((empty_row != 0).any())
        self.channels = self.channels_of(own)
        ntypes, dtype = self.request.ntypes, self.scale.dtype
        self.excludes = False
        self.register_buffer("seen", torch.ones(ntypes, ntypes, dtype=torch.bool))
        self.register_buffer("type_rows", self.scale.new_zeros(ntypes, 0))
        self.step = step / float(self.scale[:, 0].max())
        self.pieces = max(1, int(-(-1.0 // ((nearest + self.protection) * self.step))))
        size = (
            self.channels * ntypes**2 * (self.pieces + 5) * self.width * self.scale.element_size()
        )
        if size > MOST_BYTES:
            raise ModelError(
                f"the tables of {ntypes}² pairs of types would take {size / 2**20:.0f} MiB, more than "
                f"{MOST_BYTES / 2**20:.0f}: take a longer step or a smaller extrapolation"
            )
        pairs = [(centre, other) for centre in range(ntypes) for other in range(ntypes)]
        self.register_buffer(
            "table", torch.stack([self._coefficients(own, *pair) for pair in pairs]).to(dtype)
        )
        matrix = spline_matrix()
        slope = torch.zeros_like(matrix)
        slope[:, :5] = matrix[:, 1:] * torch.arange(1, 6) / self.step
        self.register_buffer("basis", torch.cat([matrix, slope]).to(dtype))

    @torch.no_grad()
    def _coefficients(self, own: Any, centre: int, other: int) -> torch.Tensor:
        """Return the tables of a pair of types `(channels, pieces + 5, M)`."""
        scale, shift = self.scale[centre, 0].double(), self.empty_row[centre, 0].double()
        features = self.features_of(own, centre, other)
        joined = spline_coefficients(lambda s: features(s * scale + shift), self.step, self.pieces)
        return joined.view(len(joined), self.channels, self.width).transpose(0, 1)

    @staticmethod
    def channels_of(own: Any) -> int:
        """Return how many tables a pair of types has."""
        raise NotImplementedError

    @staticmethod
    def features_of(own: Any, centre: int, other: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the features of a pair of types as a function `(n,)` → `(n, channels·M)` of R₀, in float64."""
        raise NotImplementedError

    def embed_exactly(
        self, x: torch.Tensor, pair: torch.Tensor, switch: torch.Tensor
    ) -> torch.Tensor:
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

    def fill(self, near: Near, other: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the part of empty slots in A `(ncentre, 4, M)`; `other` are types, `real` flags of the columns."""
        raise NotImplementedError

    @torch.jit.export
    def describe(self, near: Near) -> tuple[torch.Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        ncentre, nnei = near.neighbor.shape
        real = near.neighbor >= 0
        other = near.types[near.neighbor.clamp(min=0)].clamp(min=0)
        dtype = self.table.dtype
        vectors = (
            near.vectors.masked_fill(~real.unsqueeze(2), self.rcut).view(-1, 3).t().contiguous()
        )
        s, geometry = self._geometry(vectors)
        used = real if not self.excludes else real & self.seen[near.kind.unsqueeze(1), other]
        scale = self.scale.t()[:, near.kind].unsqueeze(2) * used
        rows = torch.cat([s.unsqueeze(0), geometry[0] * vectors]).view(4, ncentre, nnei).to(dtype)
        rows = (rows * scale + self.empty_row.t()[:, near.kind].unsqueeze(2) * used).view(4, -1)

        at = (s / self.step).clamp_(max=float(self.pieces))
        cell = at.floor().clamp_(0.0, float(self.pieces - 1))
        u = (at - cell).to(dtype)
        square = u * u
        cube = square * u
        powers = torch.stack([torch.ones_like(u), u, square, cube, square * square, cube * square])
        switch = (
            geometry[3].to(dtype) if self.channels > 1 else geometry.new_zeros([0], dtype=dtype)
        )
        outside = s > self.pieces * self.step
        both = product(self.basis, powers) * ~outside
        values, slopes = both[:6], both[6:]

        present: list[int] = (
            torch.bincount(other[real], minlength=self.request.ntypes).cpu().tolist()
        )
        kinds: list[int] = []
        number = torch.zeros([self.request.ntypes], dtype=torch.int64, device=rows.device)
        for kind in range(len(present)):
            if present[kind] > 0:
                number[kind] = len(kinds)
                kinds.append(kind)
        cells = cell.masked_fill_(outside, 0.0).to(torch.int64)
        terms = 6 if cells.numel() == 0 else int(cells.max()) + 6
        centre = torch.arange(ncentre, device=rows.device).unsqueeze(1)
        place = ((number[other] * ncentre + centre) * (4 * self.channels * terms)).view(-1) + cells
        b = self._spread(rows, values, switch, place, len(kinds) * ncentre, terms)
        a = self._contract(b, kinds, near)
        beyond = (outside & used.view(-1)).nonzero().view(-1)
        exact = torch.zeros(
            [1 + self.channels, beyond.shape[0], self.width], dtype=dtype, device=rows.device
        )
        if beyond.shape[0] > 0:
            self._tell()
            pair = near.kind.unsqueeze(1) * self.request.ntypes + other
            there = switch[beyond] if self.channels > 1 else switch
            exact = self.embed_exactly(rows[0, beyond], pair.view(-1)[beyond], there)
            a.index_add_(
                0, beyond // nnei, rows[:, beyond].t().unsqueeze(2) * exact[0].unsqueeze(1)
            )
        if self.fills:
            a = a + self.fill(near, other, real)
        a = a / self.slots
        d = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        if self.type_rows.shape[1] > 0:
            d = torch.cat([d, self.type_rows[near.kind]], dim=1)
        edges = Tape(
            vectors, geometry, rows, scale.view(4, -1), switch, values, slopes, place, beyond, exact, kinds,
            near.counts, terms, a,
        )  # fmt: skip
        return d, edges

    def _geometry(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return s `(nedges,)` and factors `(5, nedges)`.

        These are isotropic, radial and bend of `environment`, the switch, and its derivative by r divided by r.
        """
        distance = (vectors * vectors).sum(0).sqrt_()
        v = ((self.rcut - distance) / (self.rcut - self.rcut_smth)).clamp_(0.0, 1.0)
        switch = -quintic(v)  # without cancellation at the cut-off
        t = 1.0 / (distance + self.protection)
        slope = (v * (v - 1.0)).square_().mul_(-30.0 / (self.rcut - self.rcut_smth))
        slope_t = slope * t
        isotropic = switch * t * t
        bend = (slope_t - 2.0 * isotropic) * t / distance
        return switch * t, torch.stack(
            [isotropic, (slope_t - isotropic) / distance, bend, switch, slope / distance]
        )

    def _tell(self) -> None:
        """Warn once that atoms are closer than the table reaches."""
        if not self.told:
            self.told = True
            nearest = 1.0 / (self.pieces * self.step) - self.protection
            warnings.warn(
                f"two atoms are closer than {nearest} Angstrom, where this compressed potential's tables end: its nets "
                "are evaluated there, and training data have hardly shown them such distances",
                stacklevel=2,
            )

    def _spread(
        self,
        rows: torch.Tensor,
        values: torch.Tensor,
        switch: torch.Tensor,
        place: torch.Tensor,
        groups: int,
        terms: int,
    ) -> torch.Tensor:
        """Return B `(groups, 4, channels·terms)`: sums over edges of `rows·values`, and of them times the switch."""
        out = torch.zeros(
            [groups * 4 * self.channels * terms], dtype=rows.dtype, device=rows.device
        )
        for c in range(4):
            products = rows[c] * values
            for channel in range(self.channels):
                if channel > 0:
                    products = products * switch
                for k in range(6):
                    out.index_add_(
                        0, place + ((c * self.channels + channel) * terms + k), products[k]
                    )
        return out.view(groups, 4, self.channels * terms)

    def _contract(self, b: torch.Tensor, kinds: list[int], near: Near) -> torch.Tensor:
        """Return A `(ncentre, 4, M)`, without empty slots and edges beyond the table."""
        ncentre, width = near.kind.shape[0], b.shape[2]
        a = torch.zeros([ncentre * 4, self.width], dtype=b.dtype, device=b.device)
        for index in range(len(kinds)):
            rows = b[index * ncentre : (index + 1) * ncentre].view(-1, width)
            start = 0
            for centre in range(len(near.counts)):
                stop = start + 4 * near.counts[centre]
                a[start:stop] += product(
                    rows[start:stop], self._rows_of(centre, kinds[index], width // self.channels)
                )
                start = stop
        return a.view(ncentre, 4, self.width)

    def _rows_of(self, centre: int, other: int, terms: int) -> torch.Tensor:
        """Return the first rows of the tables of a pair of types `(channels·terms, M)`."""
        return self.table[centre * self.request.ntypes + other, :, :terms].reshape(-1, self.width)

    @torch.jit.export
    def pullback(self, adjoint: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        a = tape.a
        ncentre, edges = a.shape[0], tape.place.shape[0]
        a_bar = sums_pullback(adjoint, a, self.axis, self.slots)
        p = self._products(a_bar, tape)
        of_rows = torch.zeros([4, edges], dtype=a.dtype, device=a.device)
        of_s = torch.zeros([edges], dtype=a.dtype, device=a.device)  # through b′, not standardised
        of_switch = torch.zeros_like(tape.switch)
        for c in range(4):
            for channel in range(self.channels):
                value, slope = torch.zeros_like(of_s), torch.zeros_like(of_s)
                for k in range(6):
                    here = p.index_select(
                        0, tape.place + ((c * self.channels + channel) * tape.terms + k)
                    )
                    value.addcmul_(here, tape.values[k])
                    slope.addcmul_(here, tape.slopes[k])
                if channel > 0:
                    of_switch.addcmul_(value, tape.rows[c])
                    value, slope = value * tape.switch, slope * tape.switch
                of_rows[c] += value
                of_s.addcmul_(slope, tape.rows[c])
        if tape.beyond.shape[0] > 0:
            here = a_bar[tape.beyond // (edges // ncentre)]
            products = torch.bmm(here, tape.exact.permute(1, 2, 0)).permute(
                2, 1, 0
            )  # (2 or 3, 4, n)
            exact = products[0].contiguous()
            exact[0] += (products[1] * tape.rows[:, tape.beyond]).sum(0)
            of_rows.index_copy_(1, tape.beyond, exact)
            if self.channels > 1:
                of_switch.index_copy_(
                    0, tape.beyond, (products[2] * tape.rows[:, tape.beyond]).sum(0)
                )
        geometry = tape.geometry
        of_rows = (of_rows * tape.scale).to(geometry.dtype)
        along = (of_rows[1:] * tape.vectors).sum(0)
        radial = geometry[1] * (of_rows[0] + of_s) + geometry[2] * along
        if self.channels > 1:
            radial = radial + geometry[4] * of_switch
        out = geometry[0] * of_rows[1:] + radial * tape.vectors
        return out.t().reshape(ncentre, -1, 3)

    def _products(self, a_bar: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return P, flat, in the order of B."""
        flat = a_bar.view(-1, self.width)
        width = self.channels * tape.terms
        out = torch.empty(
            [len(tape.kinds), flat.shape[0], width], dtype=flat.dtype, device=flat.device
        )
        for index in range(len(tape.kinds)):
            start = 0
            for centre in range(len(tape.counts)):
                stop = start + 4 * tape.counts[centre]
                table = self._rows_of(centre, tape.kinds[index], tape.terms)
                out[index, start:stop] = product(flat[start:stop], table.t())
                start = stop
        return out.view(-1)
