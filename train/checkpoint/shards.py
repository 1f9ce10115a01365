"""Tensors in the format of `torch.distributed.checkpoint` (DCP): a file per rank, and an index."""

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
    """Write this rank's parts, which are on the CPU; return the path of the file, relative to `checkpoint`.

    Every rank of `group` calls it.

    Raises:
        OSError: A rank could not write; all ranks raise the same error.
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    tensors = {}
    for key, boxes in by_key(mine).items():
        shape = torch.Size(boxes[0].shape)
        local = LocalShardsWrapper([part.values for part in boxes], [part.offset for part in boxes])
        stride = torch.empty(shape, device="meta").stride()
        # DTensor requires a placement, but the boxes describe the layout.
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
        # Every rank has the errors of all ranks, so all raise the first rank's.
        raise min(error.failures.items())[1][0] from None
    return f"{SHARDS}/__{get_rank(group)}_0.distcp"


class _Files(FileSystem):
    """A file system that raises the original OSError instead of torch's RuntimeError."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if isinstance(cause := error.__context__, OSError):
                    raise OSError(cause.errno, cause.strerror, str(path)) from None
                raise


def read_shards(checkpoint: Path, targets: Sequence[Part]) -> None:
    """Read the values of `targets`, on any device, from the shards. Raises UserError if a target is missing."""
    reader = FileSystemReader(checkpoint / SHARDS)
    try:
        index = reader.read_metadata()
    except Exception as error:  # a damaged pickle can raise any error
        raise UserError(
            f"the index in {checkpoint / SHARDS} cannot be read ({error}); give another checkpoint"
        ) from error
    reader.set_up_storage_reader(index, is_coordinator=True)
    items = []
    for part in targets:
        saved: Any = index.state_dict_metadata.get(part.key)
        check_shape(checkpoint, part, None if saved is None else tuple(saved.size))
        if sum(math.prod(chunk.sizes) for chunk in saved.chunks) != math.prod(part.shape):
            raise UserError(f"checkpoint {checkpoint} is incomplete: a part of {part.key} is missing")
        box = ChunkStorageMetadata(torch.Size(part.offset), part.values.shape)
        items += create_read_items_for_chunk_list(part.key, saved, [box])
    reader.read_data(LoadPlan(items), _InPlace(targets)).wait()


class _InPlace(DefaultLoadPlanner):
    """A load planner that lets the reader write directly into the parts' memory."""

    def __init__(self, targets: Iterable[Part]) -> None:
        super().__init__()
        self._parts = {MetadataIndex(part.key, part.offset): part.values for part in targets}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index]
