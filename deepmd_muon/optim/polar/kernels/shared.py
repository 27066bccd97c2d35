"""One launch for matrices that are too large for one multiprocessor: several programs share a matrix.

Programs synchronize by barriers in global memory, so all programs of a launch must run concurrently: launches are
cooperative and never exceed the device. Programs exchange iterates in fp16; the master X is fp32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions, whose arguments have Triton's types, not Python's, and an
# `if` on a constant must stand alone to leave code out.

from __future__ import annotations

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.whole import (
    COLUMNS,
    HALF,
    ROW,
    ROWS,
    SINGLE,
    TILE,
    load_double,
    load_matrix,
    store_result,
)

# Bound on the programs of one matrix; a power of two.
MAX_PROGRAMS = tl.constexpr(128)


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
    """Arrive, and wait for `target` arrivals; stores that other programs made before they arrived are then visible."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = read_counter(counter)
    tl.debug_barrier()


@triton.jit
def merge(largest, squares, other_largest, other_squares):
    """Merge two pairs of largest magnitude and sum of squares relative to it."""
    joint = tl.maximum(largest, other_largest)
    safe = tl.where(joint == 0.0, 1.0, joint)
    mine = largest / safe
    theirs = other_largest / safe
    return joint, squares * mine * mine + other_squares * theirs * theirs


@triton.jit
def norm_of_all(sums, first, count, LIMIT: tl.constexpr):
    """Return the largest magnitude of a whole matrix and its norm relative to that, each 1 instead of 0.

    `sums` has `count` shares from number `first` on, at most LIMIT, as `store_share` writes them.
    """
    i = tl.arange(0, LIMIT)
    inside = i < count
    largest = tl.load(sums + 2 * (first + i), mask=inside, other=0.0)
    squares = tl.load(sums + 2 * (first + i) + 1, mask=inside, other=0.0)
    joint = tl.max(largest)
    safe = tl.where(joint == 0.0, 1.0, joint)
    share = largest / safe
    norm = tl.sqrt(tl.sum(squares * share * share))
    return safe, tl.where(norm == 0.0, 1.0, norm)


@triton.jit
def symmetric_tiles(
    target,
    source,
    depth,
    tiles,
    rank,
    count,
    b,
    d,
    ADD: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
):
    """Compute this program's tiles of S Sᵀ, or of b S + d S Sᵀ for a symmetric S, and of their mirror images.

    Rows of S have length `depth`, those of the result tiles · T.
    """
    order = tiles * T
    t = tl.arange(0, T)
    q = tl.arange(0, K)
    for number in range(rank, tiles * (tiles + 1) // 2, count):
        i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        j = number - i * (i + 1) // 2
        left = source + (i * T + t)[:, None] * depth + q[None, :]
        right = source + (j * T + t)[:, None] * depth + q[None, :]
        product = tl.zeros((T, T), tl.float32)
        for k in range(0, depth, K):
            inside = (k + q)[None, :] < depth
            rows = tl.load(left + k, mask=inside, other=0.0)
            product = tl.dot(rows, tl.trans(tl.load(right + k, mask=inside, other=0.0)), product)
        where = (i * T + t)[:, None] * order + (j * T + t)[None, :]
        if ADD:
            product = b * tl.load(source + where).to(tl.float32) + d * product
        narrow = product.to(tl.float16)
        tl.store(target + where, narrow)
        if i != j:
            tl.store(target + (j * T + t)[:, None] * order + (i * T + t)[None, :], tl.trans(narrow))


@triton.jit
def store_share(
    row, addresses, sums, rank, count, down, along, T: tl.constexpr, ONLY: tl.constexpr
):
    """Store this program's share of a matrix's norm: the largest magnitude, and the sum of squares relative to it."""
    t = tl.arange(0, T)
    largest = tl.zeros((), tl.float64)
    squares = tl.zeros((), tl.float64)
    for number in range(rank, down * along, count):
        x, peak = load_matrix(row, addresses, number % down * T + t, number // down * T + t, ONLY)
        largest, squares = merge(largest, squares, peak, tl.sum(x * x).to(tl.float64))
    tl.store(sums, largest)
    tl.store(sums + 1, squares)


@triton.jit
def normalize_tiles(
    row, addresses, sums, first, master, iterate, rank, count, down, along, width, T: tl.constexpr, ONLY: tl.constexpr
):  # fmt: skip
    """Write this program's tiles of X / ‖X‖, in fp32 and fp16."""
    t = tl.arange(0, T)
    joint, norm = norm_of_all(sums, first, count, MAX_PROGRAMS)
    for number in range(rank, down * along, count):
        r = number % down * T + t
        c = number // down * T + t
        x, peak = load_matrix(row, addresses, r, c, ONLY)
        x = x * (peak / joint / norm).to(tl.float32)
        where = r[:, None] * width + c[None, :]
        tl.store(master + where, x)
        tl.store(iterate + where, x.to(tl.float16))


@triton.jit
def update_tiles(
    row, out, a, polynomial, current, following, master, rank, count, down, along, order, width, last,
    T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Do X ← a X + P X on this program's tiles; the last step writes the result."""
    t = tl.arange(0, T)
    q = tl.arange(0, K)
    for number in range(rank, down * along, count):
        r = number % down * T + t
        c = number // down * T + t
        where = r[:, None] * width + c[None, :]
        product = tl.zeros((T, T), tl.float32)
        left = polynomial + r[:, None] * order + q[None, :]
        right = current + q[:, None] * width + c[None, :]
        for p in range(0, order, K):
            product = tl.dot(tl.load(left + p), tl.load(right + p * width), product)
        # Added last: tensor cores truncate partial sums, and a X would lose a bit in each.
        x = a * tl.load(master + where) + product
        if last:
            store_result(row, out, x, r, c)
        else:
            tl.store(master + where, x)
            tl.store(following + where, x.to(tl.float16))


@triton.jit
def tiles(
    programs, table, addresses, coefficients, out, single, half, sums, counters,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, ONLY: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Orthogonalize matrices of any size: programs share the tiles of X (T × T), of X Xᵀ and its polynomial (G × G).

    Sizes are padded to multiples of K, the number of columns per iteration of a product.
    """
    mine = programs + 3 * tl.program_id(0)
    matrix = tl.load(mine).to(tl.int64)
    rank = tl.load(mine + 1)
    count = tl.load(mine + 2)
    row = table + matrix * ROW
    counter = counters + matrix
    first = tl.program_id(0) - rank
    order = tl.multiple_of(tl.cdiv(tl.load(row + ROWS), K).to(tl.int32) * K, K)
    width = tl.multiple_of(tl.cdiv(tl.load(row + COLUMNS), K).to(tl.int32) * K, K)
    down = order // T
    along = width // T
    size = tl.multiple_of(order * width, T)
    master = single + tl.multiple_of(tl.load(row + SINGLE), 64)
    iterate = half + tl.multiple_of(tl.load(row + HALF), 64)
    gram = iterate + 2 * size
    polynomial = gram + tl.multiple_of(order * order, T)
    store_share(row, addresses, sums + 2 * (first + rank), rank, count, down, along, T, ONLY)
    barrier(counter, count)
    normalize_tiles(
        row, addresses, sums, first, master, iterate, rank, count, down, along, width, T, ONLY
    )
    barrier(counter, 2 * count)
    arrivals = 2 * count
    for k in range(STEPS):
        a = tl.load(coefficients + 3 * k)
        b = tl.load(coefficients + 3 * k + 1)
        d = tl.load(coefficients + 3 * k + 2)
        current = iterate + tl.multiple_of((k % 2) * size, T)
        following = iterate + tl.multiple_of(((k + 1) % 2) * size, T)
        symmetric_tiles(gram, current, width, order // G, rank, count, b, d, False, G, K)
        barrier(counter, arrivals + count)
        symmetric_tiles(polynomial, gram, order, order // G, rank, count, b, d, True, G, K)
        barrier(counter, arrivals + 2 * count)
        last = k + 1 == STEPS
        update_tiles(
            row, out, a, polynomial, current, following, master, rank, count, down, along, order, width, last, T, K
        )  # fmt: skip
        arrivals += 3 * count
        if not last:
            barrier(counter, arrivals)


@triton.jit
def strip(
    row, addresses, coefficients, out, half, sums, counter, first, rank, count,
    MP: tl.constexpr, NS: tl.constexpr, ONLY: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Run all steps for a matrix of at most MP rows, with NS of its columns in this program's registers.

    A step is R = X Xᵀ, whose tiles all programs of the matrix share, and X ← a X + R (b X + c R X), for which each
    needs all of R but only its own columns. So a step takes two barriers. Programs beyond the last column only compute
    R.
    """
    r = tl.arange(0, MP)
    c = rank * NS + tl.arange(0, NS)
    width = tl.multiple_of(tl.cdiv(tl.load(row + COLUMNS), NS).to(tl.int32) * NS, NS)
    buffer = half + tl.multiple_of(tl.load(row + HALF), 64)
    gram = buffer + tl.multiple_of(MP * width, 64)
    owner = rank * NS < width
    wide, power = load_double(row, addresses, r, c, ONLY)
    scaled = wide * (1.0 / power)
    tl.store(sums + 2 * (first + rank), power)
    tl.store(sums + 2 * (first + rank) + 1, tl.sum(scaled * scaled))
    barrier(counter, count)
    joint, norm = norm_of_all(sums, first, count, MAX_PROGRAMS)
    x = (scaled * (power / joint / norm)).to(tl.float32)
    arrivals = count
    for k in range(STEPS):
        a = tl.load(coefficients + 3 * k)
        b = tl.load(coefficients + 3 * k + 1)
        d = tl.load(coefficients + 3 * k + 2)
        if owner:
            tl.store(buffer + r[:, None] * width + c[None, :], x.to(tl.float16))
        barrier(counter, arrivals + count)
        # Few programs use large tiles, many use small ones, one each.
        if count < (MP // 32) * (MP // 32 + 1) // 2:
            symmetric_tiles(gram, buffer, width, MP // 64, rank, count, 0.0, 1.0, False, 64, 128)
        else:
            symmetric_tiles(gram, buffer, width, MP // 32, rank, count, 0.0, 1.0, False, 32, 128)
        arrivals += 2 * count
        barrier(counter, arrivals)
        if owner:
            whole = tl.load(gram + r[:, None] * MP + r[None, :])
            product = tl.dot(whole, x.to(tl.float16))
            product = tl.dot(whole, (b * x + d * product).to(tl.float16))
            # Added last: tensor cores truncate partial sums, and a X would lose a bit in each.
            x = a * x + product
    if owner:
        store_result(row, out, x, r, c)


@triton.jit
def strips(
    programs, table, addresses, coefficients, out, half, sums, counters,
    MASK: tl.constexpr, WIDE: tl.constexpr, ONLY: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Orthogonalize matrices of at most 256 rows, padded to 64 · 2ⁱ; MASK has bit i set when some have this height.

    A program keeps WIDE columns in its registers, or half as many of the tallest kind (256 rows).
    """
    mine = programs + 3 * tl.program_id(0)
    matrix = tl.load(mine).to(tl.int64)
    rank = tl.load(mine + 1)
    count = tl.load(mine + 2)
    row = table + matrix * ROW
    counter = counters + matrix
    first = tl.program_id(0) - rank
    height = tl.load(row + TILE)
    if MASK & 1:
        if height == 0:
            strip(
                row,
                addresses,
                coefficients,
                out,
                half,
                sums,
                counter,
                first,
                rank,
                count,
                64,
                WIDE,
                ONLY,
                STEPS,
            )
    if MASK & 2:
        if height == 1:
            strip(
                row,
                addresses,
                coefficients,
                out,
                half,
                sums,
                counter,
                first,
                rank,
                count,
                128,
                WIDE,
                ONLY,
                STEPS,
            )
    if MASK & 4:
        if height == 2:
            strip(
                row,
                addresses,
                coefficients,
                out,
                half,
                sums,
                counter,
                first,
                rank,
                count,
                256,
                WIDE // 2,
                ONLY,
                STEPS,
            )
