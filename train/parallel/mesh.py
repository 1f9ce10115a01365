"""The place of a rank on the axes dp and tp (the inner one, so that its groups lie in one node), and their process
groups; neighbours on dp may share experts out, the axis ep.

An axis of size 1 has no group (None), which means no communication; one rank of a launcher has groups of itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Torch renamed these two: 2.13 warns of the old names, and 2.11 lacks the new ones.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the ranks of its run, and the groups that it speaks to."""

    rank: int = 0
    dp: int = 1
    tp: int = 1
    ep: int = 1
    dp_group: ProcessGroup | None = None  # ranks with the same part of the model and other samples
    tp_group: ProcessGroup | None = None  # ranks with the same samples and other parts of the model
    ep_group: ProcessGroup | None = None  # of a dp group those that have each expert once
    replica_group: ProcessGroup | None = None  # of a dp group those that have the same experts
    world: ProcessGroup | None = None  # every rank, on the device's backend
    control: ProcessGroup | None = None  # every rank, gloo
    device_mesh: DeviceMesh | None = None  # the same as torch names it, for torch's own parallelism beside ours
    hosts: tuple[str, ...] = ()  # the node of every rank, by rank, where they are known

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def ep_rank(self) -> int:
        return self.dp_rank % self.ep

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, by rank, on the host; it must pickle."""
        if self.control is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def name(self, rank: int) -> str:
        """A rank as messages name it: `rank 3 on node07`."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"


def build_mesh(dp: int, tp: int, device: torch.device, ep: int = 1) -> Mesh:
    """The mesh of this rank over torch's default process group, which must have dp * tp ranks; without one, one
    process.
    """
    if not dist.is_initialized():
        return Mesh()
    device_mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))  # outer to inner
    apart = (
        init_device_mesh(device.type, (dp // ep, ep, tp), mesh_dim_names=("replica", "ep", "tp")) if ep > 1 else None
    )
    alone = dp * tp == 1
    world = dist.group.WORLD
    control = world if "gloo" in str(dist.get_backend()) else dist.new_group(backend="gloo")
    return Mesh(
        rank=dist.get_rank(),
        dp=dp,
        tp=tp,
        ep=ep,
        dp_group=device_mesh.get_group("dp") if dp > 1 or alone else None,
        tp_group=device_mesh.get_group("tp") if tp > 1 or alone else None,
        ep_group=None if apart is None else apart.get_group("ep"),
        replica_group=None if apart is None or dp == ep else apart.get_group("replica"),
        world=world,
        control=control,
        device_mesh=device_mesh,
    )
