"""The tensors of a checkpoint as `torch.distributed.checkpoint` (DCP) keeps them: a file per rank, and an index.

A rank's boxes of one tensor are a DTensor whose local tensor is a list of boxes: no placement of DTensor can express
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    save,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from ..errors import UserError
from .storage import SHARDS, Part, by_key, check_shape


def write_shards(checkpoint: Path, mine: Iterable[Part], group: ProcessGroup) -> str:
    """Writes this rank's parts, on the CPU; returns the file, below `checkpoint`. Every rank of the group calls it.

    Raises:
        OSError: a rank could not write, for example because the disk is full; the same on every rank.
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    tensors = {}
    for key, boxes in by_key(mine).items():
        shape = torch.Size(boxes[0].shape)
        local = LocalShardsWrapper([part.values for part in boxes], [part.offset for part in boxes])
        stride = torch.empty(shape, device="meta").stride()
        # The placement says nothing: the boxes do.
        tensors[key] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    writer = FileSystemWriter(checkpoint / SHARDS, per_thread_copy_ahead=0)
    writer.fs = _Files()
    try:
        save(
            tensors,
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:
        # It holds what went wrong on each rank, on every rank: the first one's speaks for all.
        raise min(error.failures.items())[1][0] from None
    return f"{SHARDS}/__{get_rank(group)}_0.distcp"


class _Files(FileSystem):
    """Files whose errors are the system's: torch's archive replaces a refused write by a RuntimeError of its own."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if isinstance(cause := error.__context__, OSError):
                    raise OSError(cause.errno, cause.strerror, str(path)) from None
                raise


def read_shards(checkpoint: Path, wanted: Sequence[Part]) -> None:
    """Fills the parts in place, wherever they lie; `UserError` where the checkpoint does not cover them."""
    reader = FileSystemReader(checkpoint / SHARDS)
    try:
        index = reader.read_metadata()
    except Exception as error:  # what a pickle that is none raises is open-ended
        raise UserError(
            f"the index in {checkpoint / SHARDS} cannot be read ({error}); give another checkpoint"
        ) from error
    reader.set_up_storage_reader(index, is_coordinator=True)
    items = []
    for part in wanted:
        saved: Any = index.state_dict_metadata.get(part.key)
        check_shape(checkpoint, part, None if saved is None else tuple(saved.size))
        if sum(math.prod(chunk.sizes) for chunk in saved.chunks) != math.prod(part.shape):
            raise UserError(f"checkpoint {checkpoint} does not cover the model: there are holes in its {part.key}")
        box = ChunkStorageMetadata(torch.Size(part.offset), part.values.shape)
        items += create_read_items_for_chunk_list(part.key, saved, [box])
    reader.read_data(LoadPlan(items), _InPlace(wanted)).wait()


class _InPlace(DefaultLoadPlanner):
    """Gives a reader the memory of parts to write to."""

    def __init__(self, wanted: Iterable[Part]) -> None:
        super().__init__()
        self._parts = {MetadataIndex(part.key, part.offset): part.values for part in wanted}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index]
