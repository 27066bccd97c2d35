"""One launch for matrices too large for one multiprocessor: several programs share a matrix.

The programs of a matrix are its *team*; a program's number in it is its rank. They synchronize by
barriers in global memory, so all programs of a launch must run at the same time: launches are
cooperative and never exceed the device. Each program keeps a strip of columns of X in registers, in
fp32; they exchange iterates in fp16.

`whole` has the formula of a step, `newton_schulz` defines the results; the gates of `kernel_cases`
compare them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions. Their arguments have Triton's types, and an `if`
# on a constant must stand alone to leave code out.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.whole import (
    COLUMNS,
    ROW,
    TILE,
    WORKSPACE_OFFSET,
    load_matrix,
    store_result,
)

# Bound on the programs of one matrix; a power of two.
MAX_PROGRAMS = tl.constexpr(128)
# Kinds of heights of `strips`: 64, 128 and 256 rows.
_N_HEIGHTS = tl.constexpr(3)

# ----- the team of a matrix ----------------------------------------------------------------------


class Team(NamedTuple):
    """The programs that share a matrix."""

    rank: Any
    count: Any
    rank_0: Any  # number of its first program in the launch
    counter: Any  # pointer to the arrivals at barriers, int32, zero at the start


@triton.jit
def team_of_program(programs, table, counters):
    """Return the table row of this program's matrix, and its team.

    `programs`, int32 (programs, 3), has matrix, rank and number of programs of that matrix.
    """
    number = tl.program_id(0)
    matrix = tl.load(programs + 3 * number).to(tl.int64)
    rank = tl.load(programs + 3 * number + 1)
    count = tl.load(programs + 3 * number + 2)
    team = Team(rank=rank, count=count, rank_0=number - rank, counter=counters + matrix)
    return table + matrix * ROW, team


@triton.jit
def read_counter(counter):
    """Read a counter with acquire semantics."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l",
        [counter],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def barrier(counter, target):
    """Arrive, and wait for `target` arrivals.

    Stores that other programs made before they arrived are then visible.
    """
    # All threads of this program have stored before its one arrival is counted.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = read_counter(counter)
    # No thread reads before the wait is over.
    tl.debug_barrier()


@triton.jit
def inverse_norm(sums, first, count, LIMIT: tl.constexpr):
    """Return 1 / ‖X‖ of a matrix, float64; 1 for zeros.

    `sums` has its sums of squares by program, float64: `count` of them from number `first` on, at
    most LIMIT.
    """
    i = tl.arange(0, LIMIT)
    squares = tl.sum(tl.load(sums + first + i, mask=i < count, other=0.0))
    return 1.0 / tl.sqrt(tl.where(squares == 0.0, 1.0, squares))


@triton.jit
def store_gram_tiles(
    target,  # R, fp16 (tiles · T, tiles · T), written
    source,  # X, fp16 (tiles · T, depth)
    depth,
    tiles,
    team,  # Team
    T: tl.constexpr,
    K: tl.constexpr,
):
    """Write this program's tiles of X Xᵀ, and their mirror images."""
    order = tiles * T
    t = tl.arange(0, T)
    q = tl.arange(0, K)
    for number in range(team.rank, tiles * (tiles + 1) // 2, team.count):
        # Tiles on and below the diagonal are numbered row by row: row i begins at i (i + 1) / 2.
        i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        j = number - i * (i + 1) // 2
        rows_at = source + (i * T + t)[:, None] * depth + q[None, :]
        columns_at = source + (j * T + t)[:, None] * depth + q[None, :]
        product = tl.zeros((T, T), tl.float32)
        for k in range(0, depth, K):
            mask = (k + q)[None, :] < depth
            rows = tl.load(rows_at + k, mask=mask, other=0.0)
            columns = tl.trans(tl.load(columns_at + k, mask=mask, other=0.0))
            product = tl.dot(rows, columns, product)
        narrow = product.to(tl.float16)
        tl.store(target + (i * T + t)[:, None] * order + (j * T + t)[None, :], narrow)
        if i != j:
            mirrored = (j * T + t)[:, None] * order + (i * T + t)[None, :]
            tl.store(target + mirrored, tl.trans(narrow))


# ----- strips ------------------------------------------------------------------------------------


@triton.jit
def strip(
    row,
    addresses,
    coefficients,
    out,
    workspace,
    sums,
    team,
    MP: tl.constexpr,
    NS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Run all steps for a matrix of at most MP rows, with NS columns in this program's registers.

    A step is R = X Xᵀ, whose tiles the team shares, and X ← a X + R (b X + c R X), for which each
    program needs all of R but only its own columns. So a step takes two barriers. Programs beyond
    the last column only compute R.
    """
    rank = team.rank
    count = team.count
    r = tl.arange(0, MP)
    c = rank * NS + tl.arange(0, NS)
    width = tl.multiple_of(tl.cdiv(tl.load(row + COLUMNS), NS).to(tl.int32) * NS, NS)
    iterate = workspace + tl.multiple_of(tl.load(row + WORKSPACE_OFFSET), 64)  # (MP, width)
    gram = iterate + tl.multiple_of(MP * width, 64)  # (MP, MP)
    has_columns = rank * NS < width
    wide = load_matrix(row, addresses, r, c).to(tl.float64)
    tl.store(sums + team.rank_0 + rank, tl.sum(wide * wide))
    barrier(team.counter, count)
    x = (wide * inverse_norm(sums, team.rank_0, count, MAX_PROGRAMS)).to(tl.float32)
    arrivals = count
    for k in range(STEPS):
        a = tl.load(coefficients + 3 * k)
        b = tl.load(coefficients + 3 * k + 1)
        d = tl.load(coefficients + 3 * k + 2)
        if has_columns:
            tl.store(iterate + r[:, None] * width + c[None, :], x.to(tl.float16))
        barrier(team.counter, arrivals + count)
        # Few programs use large tiles, many use small ones, one each.
        if count < (MP // 32) * (MP // 32 + 1) // 2:
            store_gram_tiles(gram, iterate, depth=width, tiles=MP // 64, team=team, T=64, K=128)
        else:
            store_gram_tiles(gram, iterate, depth=width, tiles=MP // 32, team=team, T=32, K=128)
        arrivals += 2 * count
        barrier(team.counter, arrivals)
        if has_columns:
            all_of_r = tl.load(gram + r[:, None] * MP + r[None, :])
            product = tl.dot(all_of_r, x.to(tl.float16))
            product = tl.dot(all_of_r, (b * x + d * product).to(tl.float16))
            # Added last: tensor cores truncate partial sums, and a X would lose a bit in each.
            x = a * x + product
    if has_columns:
        store_result(row, out, x, r, c)


@triton.jit
def strips(
    programs,  # int32 (programs, 3): matrix, rank and number of programs of that matrix
    table,  # rows of `whole.ROW`, one per matrix
    addresses,
    coefficients,  # fp32 (STEPS, 3)
    out,
    workspace,  # fp16: X and R of each matrix
    sums,  # float64 (programs,), see `inverse_norm`
    counters,  # int32 (matrices,), zero
    MASK: tl.constexpr,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Orthogonalize matrices of at most 256 rows, padded to 64 · 2ⁱ.

    MASK has bit i set if some have this height.

    A program keeps WIDE columns in its registers, or half as many of the tallest kind (256 rows).
    """
    row, team = team_of_program(programs, table, counters)
    height = tl.load(row + TILE)
    for i in tl.static_range(_N_HEIGHTS):
        if MASK & (1 << i):
            if height == i:
                strip(
                    row,
                    addresses,
                    coefficients,
                    out,
                    workspace=workspace,
                    sums=sums,
                    team=team,
                    MP=64 << i,
                    NS=WIDE // 2 if i == 2 else WIDE,
                    STEPS=STEPS,
                )
