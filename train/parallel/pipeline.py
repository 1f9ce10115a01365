"""Pipeline parallelism: one rank's actions of a schedule, and the messages between them.

Every rank has the tokens, so that residual streams and their gradients alone travel. On each way the message that a
rank awaits next is received ahead of time. What was sent is kept until a message shows that it has come, for gloo does
not say so itself. Messages of one way keep their order (`schedules.check`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from ..config import ParallelConfig
from ..hardware import read, synchronize
from ..model.gpt import GPT
from ..model.later import Later, Linear, Products
from .data import Gradients
from .layout import Shape
from .mesh import Mesh
from .schedules import Action, Event, Lists, rank_of, schedule, stage_of
from .tensor import SplitWeight

FORWARD, BACKWARD = 0, 1  # ways: of activations to the next virtual stage, of gradients to the one before

_schedule = lru_cache(maxsize=4)(schedule)


class Message(NamedTuple):
    way: int
    micro: int
    stage: int  # virtual, that gets it


class Messages:
    """What one rank sends and gets while all go through their lists, `mesh.pp * chunks` virtual stages.

    Args:
        shapes: of what travels of each micro-batch, of the type of `like`.
        patient: a send waits for the one before the last, where every rank has the same list, of forward actions alone.
        v: chunks lie in a V.
    """

    def __init__(
        self, lists: Lists, chunks: int, mesh: Mesh, shapes: Sequence[Shape], like: Tensor, patient: bool,
        v: bool,
    ) -> None:  # fmt: skip
        self.v, self.handed = v, dict[Message, Tensor]()  # what the rank gives to itself
        self.mesh, self.last, self.shapes, self.like, self.patient = mesh, mesh.pp * chunks - 1, shapes, like, patient
        self.turns = dict[Message, int]()  # of the actions that each is for, by rank
        for rank, actions in enumerate(lists):
            for turn, (kind, micro, chunk) in enumerate(actions):
                if kind != "weight":
                    way = FORWARD if kind == "forward" else BACKWARD
                    self.turns[Message(way, micro, stage_of(rank, chunk, mesh.pp, v))] = turn
        own = [each for each in self.turns if self._rank(each.stage) == mesh.pp_rank and self._comes(each)]
        self.awaited = [iter([each for each in own if each.way == way]) for way in (FORWARD, BACKWARD)]
        self.coming = [self._post(way) for way in (FORWARD, BACKWARD)]
        self.sent: list[tuple[Message, Any, Tensor]] = []

    def receive(self, way: int, micro: int, stage: int) -> Tensor:
        coming, message = self.coming[way], Message(way, micro, stage)
        if message in self.handed:
            return self.handed.pop(message)
        assert coming is not None, message
        self.coming[way] = self._post(way)
        work, x = coming
        work.wait()
        # Its sender has done all that comes before it, and so got what that needs.
        source = self._source(message)
        done = self.turns[message._replace(stage=source)]
        self.let_go(lambda each: self._rank(each.stage) == self._rank(source) and self.turns[each] < done)
        return x

    def send(self, way: int, micro: int, stage: int, x: Tensor) -> None:
        message, x, rank = Message(way, micro, stage), x.detach().contiguous(), self._rank(stage)
        if rank == self.mesh.pp_rank:
            self.handed[message] = x
            return
        if self.patient and rank > 0 and len(self.sent) > 1:
            self.sent.pop(0)[1].wait()
        work = dist.isend(x, group=edge(self.mesh, way, self.mesh.pp_rank, rank), group_dst=rank)
        self.sent.append((message, work, x))

    def let_go(self, has_come: Callable[[Message], bool] = lambda each: True) -> None:
        """Ends sends that have come, or waits until all have."""
        for message, work, _ in self.sent:
            if has_come(message):
                work.wait()
        self.sent = [each for each in self.sent if not has_come(each[0])]

    def _source(self, message: Message) -> int:
        """The virtual stage that sends it; nobody does where there is none."""
        return message.stage - 1 if message.way == FORWARD else message.stage + 1

    def _rank(self, stage: int) -> int:
        return rank_of(stage, self.mesh.pp, self.v)

    def _comes(self, message: Message) -> bool:
        """From another rank."""
        source = self._source(message)
        return 0 <= source <= self.last and self._rank(source) != self._rank(message.stage)

    def _post(self, way: int) -> tuple[Any, Tensor] | None:
        if (message := next(self.awaited[way], None)) is None:
            return None
        x, rank = self.like.new_empty(self.shapes[message.micro]), self._rank(self._source(message))
        work = dist.irecv(x, group=edge(self.mesh, way, rank, self.mesh.pp_rank), group_src=rank)
        return work, x


def edge(mesh: Mesh, way: int, source: int, target: int) -> ProcessGroup:
    around = source > target if way == FORWARD else source < target
    return mesh.edges[way + 2 * around]


def meet(mesh: Mesh, way: int, word: Tensor, v: bool) -> None:
    """NCCL connects two ranks when both first speak, and waits: so in turn, before all wait for each other."""
    step = 1 if way == FORWARD else -1
    around = [(rank, rank + step) for rank in range(mesh.pp)]
    there_and_back = [pair for rank, after in around for pair in ((rank, after), (after, rank)) if 0 <= after < mesh.pp]
    for source, target in there_and_back if v else ((rank, after % mesh.pp) for rank, after in around):
        if mesh.pp_rank == source:
            dist.send(word, group=edge(mesh, way, source, target), group_dst=target)
        elif mesh.pp_rank == target:
            dist.recv(word, group=edge(mesh, way, source, target), group_src=source)


class Pipeline:
    """The passes of one rank, which has `gpt.chunks` of the blocks."""

    def __init__(self, gpt: GPT, mesh: Mesh, gradients: Gradients, parallel: ParallelConfig) -> None:
        self.gpt, self.mesh, self.gradients, self.name = gpt, mesh, gradients, parallel.schedule
        self.split = mesh.tp if parallel.sequence_parallel else 1  # ranks that share a residual stream's tokens out
        self.like, self.v = gradients.shards[0], parallel.schedule == "zb-v"
        self.events: list[Event] | None = None  # of a step that is timed
        self.begun = 0.0
        for way in (FORWARD, BACKWARD):
            meet(mesh, way, self.like.new_zeros(1), self.v)
        # At both ends of a V; if tied, its gradients are those of the first chunk.
        self.table = gpt.embedding.weight if self.v and mesh.pp_rank == 0 else None
        self.later = Later()
        if self.name.startswith("zb"):
            gradients.later = self.later
            for module in gpt.blocks.modules():
                if isinstance(module, Linear | SplitWeight):
                    module.later = self.later

    def step(self, rows: Sequence[Tensor], share: float, z_loss: float, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward passes of micro-batches of tokens (n, T + 1), each `share` of the batch; this rank's
        part () of the batch's mean loss, which is 0 but on the last stage.
        """
        lists = _schedule(self.name, self.mesh.pp, len(rows), len(self.gpt.chunks))
        actions, messages = lists[self.mesh.pp_rank], self._messages(lists, rows, patient=False)
        ends = {action.chunk: turn for turn, action in enumerate(actions) if action.kind in ("backward", "weight")}
        graphs = dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]]()
        left = dict[tuple[int, int], Products]()
        ready: list[dict[Tensor, Tensor]] = [{} for _ in self.gpt.chunks]
        total = torch.zeros((), dtype=self.gradients.wide, device=self.like.device)
        # A penalty's gradient is that of the mean loss, which only the last stage computes.
        self.gpt.slope[:] = [scaled(total.new_full((), share))]
        for turn, (kind, micro, chunk) in enumerate(actions):
            place, stage, self.begun = (micro, chunk), self._stage(chunk), time.time()
            if kind == "forward":
                x, y = self._forward(messages, micro, chunk, rows[micro][:, :-1])
                if stage == messages.last:
                    loss = self.gpt.score(y, rows[micro][:, 1:], z_loss=z_loss) * share
                    total += loss.detach()
                    graphs[place] = x, scaled(loss)
                else:
                    messages.send(FORWARD, micro, stage + 1, y)
                    graphs[place] = x, get_gradient_edge(y)  # not y, which ends when it has come
                    del y
            elif kind == "input":
                with self.later.leave(ready[chunk]) as left[place]:
                    self._backward(messages, micro, chunk, *graphs.pop(place))
                if chunk and self.table in ready[chunk]:
                    ready[0][self.table] = ready[chunk].pop(self.table) + ready[0].get(self.table, 0)
            else:
                with self.gradients.micro_batch(turn == ends[chunk], chunk):
                    if kind == "backward":
                        self._backward(messages, micro, chunk, *graphs.pop(place))
                    else:
                        self.gradients.add_all(left.pop(place), ready[chunk])
            if self.events is not None:
                synchronize(self.like.device)
                self.events.append(Event(self.mesh.pp_rank, kind, micro, chunk, self.begun, time.time()))
        messages.let_go()
        return total

    @torch.no_grad()
    def losses(self, windows: Tensor, beat: Callable[[], None], batch_tokens: int = 16384) -> Tensor:
        """As `sequence_losses`, on every rank; called on all at once."""
        rows = windows.to(self.like.device).split(max(1, batch_tokens // (windows.shape[1] - 1)))
        groups = [range(first, min(first + self.mesh.pp, len(rows))) for first in range(0, len(rows), self.mesh.pp)]
        chunks = range(len(self.gpt.chunks))
        actions = [Action("forward", micro, chunk) for group in groups for chunk in chunks for micro in group]
        messages = self._messages([actions] * self.mesh.pp, rows, patient=True)
        found = torch.zeros(len(windows), dtype=torch.float64, device=self.like.device)
        for _, micro, chunk in actions:
            beat()
            stage = self._stage(chunk)
            _, y = self._forward(messages, micro, chunk, rows[micro][:, :-1])
            if stage == messages.last:
                losses = self.gpt.score(y, rows[micro][:, 1:], reduction="none").double().sum(1)
                found[micro * len(rows[0]) :][: len(losses)] = losses
            else:
                messages.send(FORWARD, micro, stage + 1, y)
        messages.let_go()
        dist.broadcast(found, group=self.mesh.pp_group, group_src=rank_of(messages.last, self.mesh.pp, self.v))
        return read(found)

    def loads(self) -> Tensor:
        """As `GPT.loads`, of the blocks of all stages; called on all ranks at once."""
        config = self.gpt.config
        every = torch.zeros(config.depth, config.experts, dtype=torch.int64, device=self.like.device)
        if (loads := self.gpt.loads()) is not None:
            every[[number for chunk in self.gpt.chunks for number in chunk if number >= config.dense_layers]] = loads
        dist.all_reduce(every, group=self.mesh.pp_group)
        return every[config.dense_layers :]

    def _stage(self, chunk: int) -> int:
        return stage_of(self.mesh.pp_rank, chunk, self.mesh.pp, self.v)

    def _messages(self, lists: Lists, rows: Sequence[Tensor], *, patient: bool) -> Messages:
        width, sizes = self.gpt.config.width, [(len(part), (part.shape[1] - 1) // self.mesh.cp) for part in rows]
        shapes = [(n * time // self.split, width) if self.split > 1 else (n, time, width) for n, time in sizes]
        return Messages(lists, len(self.gpt.chunks), self.mesh, shapes, self.like, patient, self.v)

    def _receive(self, messages: Messages, way: int, micro: int, stage: int) -> Tensor:
        x = messages.receive(way, micro, stage)
        if self.events is not None:
            synchronize(self.like.device)
            self.begun = time.time()
        return x

    def _forward(self, messages: Messages, micro: int, chunk: int, tokens: Tensor) -> tuple[Tensor | None, Tensor]:
        """What a chunk gets of another stage, and gives."""
        stage = self._stage(chunk)
        if stage == 0:
            return None, self.gpt.through(self.gpt.enter(tokens), tokens)
        x = self._receive(messages, FORWARD, micro, stage).requires_grad_(torch.is_grad_enabled())
        return x, self.gpt.through(x, tokens, chunk)

    def _backward(
        self, messages: Messages, micro: int, chunk: int, x: Tensor | None, root: Tensor | GradientEdge
    ) -> None:
        stage = self._stage(chunk)
        torch.autograd.backward(
            root, None if stage == messages.last else self._receive(messages, BACKWARD, micro, stage)
        )
        if x is not None:
            assert x.grad is not None
            messages.send(BACKWARD, micro, stage - 1, x.grad)
