"""What the checks of distributed_worker.py share: meshes over four ranks, sharding by letter, and the judgement.

Every rank makes the same whole tensors and takes its own part of them, so that preparing a call sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from harness import assert_same

RANKS = 4


@cache  # one object for each: torch.compile mixes up meshes that are merely equal
def mesh(shape: str) -> DeviceMesh:
    """4: all ranks; 2x2: a grid of them; 2: its rows, two pairs that do the same."""
    if shape == "2":
        return mesh("2x2")["inner"]
    names = ("outer", "inner")[: shape.count("x") + 1]
    return init_device_mesh("cpu", tuple(map(int, shape.split("x"))), mesh_dim_names=names)


def placements(cut: str, dims: str, shape: Sequence[int] = ()) -> list[Placement]:
    """For each dimension of the mesh the dimension that it shards, by letter: b, s, h or f.

    A tensor whose `dims` lack the letter, or have size 1 there in `shape`, is whole.
    """
    shared = [d for d, n in zip(dims, shape, strict=False) if n == 1]
    return [Shard(dims.index(c)) if c in dims and c not in shared else Replicate() for c in cut]


def place(whole: Tensor, where: DeviceMesh, how: Sequence[Placement]) -> DTensor:
    return distribute_tensor(whole, where, how, src_data_rank=None)


def assert_part(actual: DTensor, whole: Tensor, how: Sequence[Placement]) -> None:
    """It is placed so, and this rank's part has the bits of that part of the whole."""
    assert actual.shape == whole.shape and actual.placements == tuple(how)
    assert_same(actual.to_local(), place(whole, actual.device_mesh, how).to_local())


class Silent(CommDebugMode):
    """Fails where this rank talked to another."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        assert not self.get_total_counts(), self.get_comm_counts()


def errors_of_all_ranks(error: str) -> str:
    everybody: list[str] = [""] * RANKS
    dist.all_gather_object(everybody, error)
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(everybody) if text)
