"""One evaluation on several processes, each with the whole model and a share of the requests.

Every rank gets all answers. Requests are dealt out in lexicographic order, which keeps shared prompts on one rank, and
in rounds, so that answers can be stored between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ...train.config import ParallelConfig
from ...train.errors import UserError
from ...train.job.environment import detect
from ...train.job.fork import run_ranks
from ...train.job.rendezvous import meet
from ...train.parallel.mesh import Mesh, build_mesh
from .trees import Request, ordered, shared_length

T = TypeVar("T")

MAX_FORKS = 64  # ranks that a machine with fewer cores may have
PATIENCE = timedelta(days=2)  # how long a rank waits for another one; a dead rank is noticed at once


def share_requests(requests: Sequence[Request], ranks: int, round_tokens: int) -> Iterator[list[list[int]]]:
    """Yield rounds of requests: indices per rank, about `round_tokens` tokens each (shared prefixes count once)."""
    places, new, before = [], [], np.zeros(0, dtype=np.int64)
    for place, inputs in ordered(requests, range(len(requests))):
        places.append(place)
        # The part shared with the request before is computed there.
        new.append(max(1, len(inputs) - shared_length(before, inputs)))
        before = inputs
    done = np.cumsum(new)
    rounds = max(1, round(int(done[-1]) / (ranks * round_tokens))) if places else 0
    # A request belongs to the piece in which its middle token lies.
    piece = ((done - np.asarray(new) / 2) * (rounds * ranks) // done[-1]).astype(int) if places else np.zeros(0, int)
    for number in range(rounds):
        yield [[places[k] for k in np.flatnonzero(piece == number * ranks + rank)] for rank in range(ranks)]


def on_ranks(count: int, function: Callable[[Mesh], T], *, device: str = "cpu") -> T:
    """Call a function on every rank of a job and return its result.

    Under torchrun or submitit the ranks are the job's, with one GPU each if `device` is `cuda`; each returns its
    result. Otherwise this process forks `count` ranks (if more than 1), one thread each, and returns rank 0's result.

    Raises:
        UserError: The function raised it on any rank, or the number of ranks is not possible here.
        RuntimeError: A rank raised another error, or died.
    """
    launched, max_forks = detect(), max(MAX_FORKS, os.cpu_count() or 1)
    if not 1 <= count <= max_forks:
        raise UserError(f"ranks is {count}; it must be 1 to {max_forks} on this machine")
    if launched.size > 1:
        if count not in (1, launched.size):
            raise UserError(f"ranks is {count}, but {launched.source} started {launched.size}; leave ranks out")
        parallel = ParallelConfig(dp=launched.size, timeout_seconds=PATIENCE.total_seconds())
        with meet(launched, Path(), parallel, torch.device(device)) as (mesh, _):
            return function(mesh)
    if count == 1:
        return function(Mesh())
    if device != "cpu":
        raise UserError(f"ranks is {count} on {device}; start one per GPU with torchrun --nproc-per-node {count}")

    # The tokenizers library's threads do not survive a fork; without this it prints a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def rank() -> tuple[bool, Any]:
        try:
            result = function(build_mesh(count, 1, torch.device("cpu")))
            return True, result if dist.get_rank() == 0 else None
        except UserError as error:
            return False, str(error)

    answers = run_ranks(count, rank, timeout=PATIENCE.total_seconds())
    for is_result, message in answers:
        if not is_result:
            raise UserError(message)
    result: T = answers[0][1]
    return result
