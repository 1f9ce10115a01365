"""Pipeline parallelism: one rank's actions of a schedule, and the messages between them.

Every rank has the tokens, so that residual streams and their gradients alone travel. A message that a rank will await
is received ahead of time, one on each way; what was sent is kept until a later message shows that it has come, for
gloo does not say so itself. Messages on one way keep their order (`schedules.check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Work

from ..hardware import read
from ..model.gpt import GPT
from ..model.later import Later, Left
from .data import Gradients
from .mesh import Mesh
from .schedules import Action, Lists, schedule

FORWARD, BACKWARD = 0, 1  # ways: of activations to the next virtual stage, of gradients to the one before


class Message(NamedTuple):
    way: int
    micro: int
    stage: int  # virtual, that gets it


class Messages:
    """What one rank sends and gets while ranks go through their lists.

    Args:
        shape: of the residual stream of a micro-batch.
        bounded: all ranks have the same forward actions, so that a send may wait for the one before the last.
    """

    def __init__(
        self, lists: Lists, count: int, mesh: Mesh, shape: Callable[[int], tuple[int, ...]], like: Tensor, *, bounded: bool
    ) -> None:
        self.mesh, self.count, self.shape, self.like, self.bounded = mesh, count, shape, like, bounded
        self.turns = {  # of the actions that get each message
            Message(BACKWARD if action.kind in ("backward", "input") else FORWARD, action.micro, virtual): turn
            for rank, actions in enumerate(lists)
            for turn, action in enumerate(actions)
            if action.kind != "weight" and (virtual := action.chunk * mesh.pp + rank) >= 0
        }
        own = [message for message in self.turns if message.stage % mesh.pp == mesh.pp_rank]
        self.awaited = [iter([one for one in own if one.way == way and self.source(one) is not None]) for way in (0, 1)]
        self.coming = [self._post(way) for way in (FORWARD, BACKWARD)]
        self.sent: list[tuple[Message, Work, Tensor]] = []

    def source(self, message: Message) -> int | None:
        """The virtual stage that sends it; None: nobody does."""
        stage = message.stage - 1 if message.way == FORWARD else message.stage + 1
        return stage if 0 <= stage < self.count else None

    def receive(self, message: Message) -> Tensor:
        coming, source = self.coming[message.way], self.source(message)
        assert coming is not None
        assert source is not None
        expected, work, x = coming
        assert message == expected
        self.coming[message.way] = self._post(message.way)
        work.wait()
        # Its sender has done all before it.
        done = self.turns[message._replace(stage=source)]
        self._let_go(lambda each: each.stage % self.mesh.pp == source % self.mesh.pp and self.turns[each] < done)
        return x

    def send(self, message: Message, x: Tensor) -> None:
        x, target = x.detach().contiguous(), message.stage % self.mesh.pp
        if self.bounded and target > 0:
            while len(self.sent) > 1:
                self.sent.pop(0)[1].wait()
        work = dist.isend(x, group=self._group(message.way, self.mesh.pp_rank, target), group_dst=target)
        assert work is not None
        self.sent.append((message, work, x))

    def end(self) -> None:
        self._let_go(lambda each: True)

    def _let_go(self, has_come: Callable[[Message], bool]) -> None:
        for message, work, _ in self.sent:
            if has_come(message):
                work.wait()
        self.sent = [each for each in self.sent if not has_come(each[0])]

    def _post(self, way: int) -> tuple[Message, Work, Tensor] | None:
        message = next(self.awaited[way], None)
        source = None if message is None else self.source(message)
        if message is None or source is None:
            return None
        x, rank = self.like.new_empty(self.shape(message.micro)), source % self.mesh.pp
        work = dist.irecv(x, group=self._group(way, rank, self.mesh.pp_rank), group_src=rank)
        assert work is not None
        return message, work, x

    def _group(self, way: int, source: int, target: int) -> dist.ProcessGroup:
        around = source > target if way == FORWARD else source < target
        return self.mesh.edges[way + 2 * around]
