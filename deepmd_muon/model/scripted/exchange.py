"""Features of ghost neighbours: gathered from their originals, or exchanged between ranks."""

import torch
from torch import Tensor

from deepmd_muon.model.scripted.near import Near

# LAMMPS's plugin always loads deepmd-kit's operators. Scripting and loading a file elsewhere needs
# only their schemas.
BORDER_OP = (
    "border_op(Tensor sendlist, Tensor sendproc, Tensor recvproc, Tensor sendnum, "
    "Tensor recvnum, Tensor g1, Tensor communicator, Tensor nlocal, Tensor nghost) -> Tensor[]"
)
# Operators that deepmd-kit's files name; only its compressed models call them.
TABULATED = (
    "tabulate_fusion_se_a(Tensor table, Tensor info, Tensor em_x, Tensor em, int width) -> "
    "Tensor[]",
    "tabulate_fusion_se_r(Tensor table, Tensor info, Tensor em, int width) -> Tensor[]",
    "tabulate_fusion_se_t(Tensor table, Tensor info, Tensor em_x, Tensor em, int width) -> "
    "Tensor[]",
    "tabulate_fusion_se_t_tebd(Tensor table, Tensor info, Tensor em_x, Tensor em, int width) "
    "-> Tensor[]",
    "tabulate_fusion_se_atten(Tensor table, Tensor info, Tensor em_x, Tensor em, Tensor two_embed, "
    "int width, bool sorted) -> Tensor[]",
)
_libraries: list[torch.library.Library] = []  # a schema disappears with its library


def declare_operators(*schemas: str) -> None:
    """Declare operators of the namespace `deepmd` that deepmd-kit has not registered itself."""
    missing = [
        schema for schema in schemas if not hasattr(torch.ops.deepmd, schema.partition("(")[0])
    ]
    if missing:
        library = torch.library.Library("deepmd", "FRAGMENT")
        for schema in missing:
            library.define(schema)
        _libraries.append(library)


def neighbor_rows(rows: Tensor, near: Near) -> Tensor:
    """Return rows of neighbours `(ncentre, nnei, n)` from rows of centres `(ncentre, n)`.

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
    all_rows = torch.ops.deepmd.border_op(
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
    neighbor_features: Tensor = all_rows[neighbor]
    return neighbor_features
