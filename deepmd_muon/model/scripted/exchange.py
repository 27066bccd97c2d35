"""Features of neighbours that are ghosts: gathered by the atom they are an image of, or exchanged between ranks."""

import torch

from deepmd_muon.model.scripted.near import Near

# LAMMPS's plugin always loads deepmd-kit's operators; scripting and loading a file elsewhere needs only their schemas.
BORDER_OP = (
    "border_op(Tensor sendlist, Tensor sendproc, Tensor recvproc, Tensor sendnum, Tensor recvnum, Tensor g1, "
    "Tensor communicator, Tensor nlocal, Tensor nghost) -> Tensor[]"
)
_libraries: list[torch.library.Library] = []  # a schema goes with its library


def declare_operators(*schemas: str) -> None:
    """Make schemas of the namespace `deepmd` known, except where deepmd-kit has registered the operator itself."""
    missing = [
        schema for schema in schemas if not hasattr(torch.ops.deepmd, schema.partition("(")[0])
    ]
    if missing:
        _libraries.append(torch.library.Library("deepmd", "FRAGMENT"))
        for schema in missing:
            _libraries[-1].define(schema)


def neighbor_rows(rows: torch.Tensor, near: Near) -> torch.Tensor:
    """Return the rows of every neighbour `(ncentre, nnei, n)` from those of the centres `(ncentre, n)`.

    Rows of empty slots are arbitrary.
    """
    neighbor = near.neighbor.clamp(min=0)
    if len(near.comm) == 0:
        return rows[near.place[neighbor]]
    comm = near.comm
    natoms = near.types.shape[0]
    nlocal = near.nlocal
    local = torch.zeros([natoms, rows.shape[1]], dtype=rows.dtype, device=rows.device)
    local = local.index_copy(0, near.centre, rows)
    everywhere = torch.ops.deepmd.border_op(
        comm["send_list"],
        comm["send_proc"],
        comm["recv_proc"],
        comm["send_num"],
        comm["recv_num"],
        local,
        comm["communicator"],
        torch.tensor(nlocal, dtype=torch.int32),
        torch.tensor(natoms - nlocal, dtype=torch.int32),
    )[0]
    found: torch.Tensor = everywhere[neighbor]
    return found
