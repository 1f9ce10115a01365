"""A rank's place on the axes pp, dp, cp and tp, from outer to inner, and its process groups.

A tp group is in one node. Ranks along dp and cp may split experts (axis ep). An axis of size 1 has no group (None); a
launcher's only rank has groups with itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# PyTorch renamed these two: 2.13 warns about the old names, and 2.11 lacks the new ones.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Mesh:
    rank: int = 0
    dp: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1
    dp_group: ProcessGroup | None = None  # ranks with the same part of the model and of sequences, and other sequences
    cp_group: ProcessGroup | None = None  # ranks with the same part of the model and other parts of the same sequences
    data_group: ProcessGroup | None = None  # dp and cp: ranks with the same part of the model and other tokens
    tp_group: ProcessGroup | None = None  # ranks with the same tokens and blocks, and other parts of each block
    pp_group: ProcessGroup | None = None  # ranks with the same tokens and other blocks
    edges: tuple[ProcessGroup, ...] = ()  # the ranks of pp_group 4 times: for activations and for gradients, and for
    # both between the last stage and the first. So in each group two ranks send in one direction only.
    ends_group: ProcessGroup | None = None  # on the first and last stage: the data groups of both
    ep_group: ProcessGroup | None = None  # ranks of a data group that together have each expert once
    replica_group: ProcessGroup | None = None  # ranks of a data group with the same experts
    world: ProcessGroup | None = None  # every rank, on the device's backend
    control: ProcessGroup | None = None  # every rank, gloo
    stage_world: ProcessGroup | None = None  # every rank with the same blocks; None without a pipeline
    stage_control: ProcessGroup | None = None  # likewise, gloo
    device_mesh: DeviceMesh | None = None  # torch's form of the mesh, for its own parallelism
    hosts: tuple[str, ...] = ()  # the node of every rank, by rank, if known

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data(self) -> int:
        return self.dp * self.cp

    @property
    def data_rank(self) -> int:
        return self.rank // self.tp % self.data

    @property
    def dp_rank(self) -> int:
        return self.data_rank // self.cp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.data * self.tp)

    @property
    def ep_rank(self) -> int:
        return self.data_rank % self.ep

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return a rank's indices in its data group and in its tensor-parallel group, on a mesh without a pipeline."""
        return divmod(rank, self.tp)

    @property
    def stage(self) -> Mesh:
        if self.pp == 1:
            return self
        rank = self.rank % (self.data * self.tp)
        return replace(
            self, rank=rank, pp=1, pp_group=None, world=self.stage_world, control=self.stage_control, hosts=()
        )

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, by rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages: `rank 3 (stage 1) on node07`."""
        stage = f" (stage {rank // (self.data * self.tp)})" if self.pp > 1 else ""
        return f"rank {rank}{stage} on {self.hosts[rank]}" if self.hosts else f"rank {rank}{stage}"


def build_mesh(dp: int, tp: int, device: torch.device, ep: int = 1, cp: int = 1, pp: int = 1) -> Mesh:
    """Return this rank's mesh over torch's default process group, which must have pp * dp * cp * tp ranks.

    Without a process group it is the mesh of one process.
    """
    if not dist.is_initialized():
        return Mesh()
    axes: dict[str, Any] = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}  # outer to inner
    device_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    data, alone = dp * cp, math.prod(axes.values()) == 1
    groups = {name: device_mesh.get_group(name) if size > 1 else None for name, size in axes.items()}
    both = groups["dp"] or groups["cp"]
    if dp > 1 and cp > 1:
        both = _groups(device, (pp, data, tp), 1)
    experts = (pp, data // ep, ep, tp)
    stages = [list(range(stage * data * tp, (stage + 1) * data * tp)) for stage in range(pp)]
    ends = [[*stages[0][rank::tp], *stages[-1][rank::tp]] for rank in range(tp)] if pp > 1 else []
    world = dist.group.WORLD
    control = world if "gloo" in str(dist.get_backend()) else dist.new_group(backend="gloo")
    return Mesh(
        rank=dist.get_rank(),
        **axes,
        ep=ep,
        dp_group=device_mesh.get_group("dp") if alone else groups["dp"],
        cp_group=groups["cp"],
        data_group=device_mesh.get_group("dp") if alone else both,
        tp_group=device_mesh.get_group("tp") if alone else groups["tp"],
        pp_group=groups["pp"],
        edges=tuple(filter(None, (_group_of(zip(*stages, strict=True)) for _ in range(4 if pp > 1 else 0)))),
        ends_group=_group_of(ends),
        ep_group=_groups(device, experts, 2) if ep > 1 else None,
        replica_group=_groups(device, experts, 1) if 1 < ep < data else None,
        world=world,
        control=control,
        stage_world=_groups(device, (pp, data * tp), 1) if pp > 1 else None,
        stage_control=_groups(torch.device("cpu"), (pp, data * tp), 1) if pp > 1 else None,
        device_mesh=device_mesh,
    )


def _group_of(groups: Iterable[Sequence[int]]) -> ProcessGroup | None:
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def _groups(device: torch.device, shape: tuple[int, ...], axis: int) -> ProcessGroup:
    return init_device_mesh(device.type, shape).get_group(axis)
