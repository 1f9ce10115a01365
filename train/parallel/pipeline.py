"""Pipeline parallelism: one rank's actions of a schedule, and the messages between ranks.

Every rank has the tokens, so only residual streams and their gradients are sent. In each direction a rank posts the
receive of its next message early. Sent tensors are kept until a message proves their arrival, because gloo does not
report it. Every schedule receives the messages of one direction in the order sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup

from ..config import ParallelConfig
from ..hardware import read
from ..model.gpt import GPT
from .data import Gradients
from .layout import Shape
from .mesh import Mesh
from .schedules import Action, Lists, schedule

FORWARD, BACKWARD = 0, 1  # ways: activations go to the next virtual stage, gradients to the previous one

_schedule = lru_cache(maxsize=4)(schedule)  # the same lists at every step


class Message(NamedTuple):
    way: int
    micro: int
    stage: int  # the virtual stage that receives it


class Messages:
    """Messages that one rank sends and receives while all ranks execute their lists.

    Args:
        lists: the actions of every rank.
        chunks: per rank.
        shapes: of each micro-batch's residual stream.
        like: a tensor with the stream's dtype and device.
        patient: a send waits for the one before the last; allowed if all ranks have the same list of forward actions.
    """

    def __init__(
        self, lists: Lists, chunks: int, mesh: Mesh, shapes: Sequence[Shape], like: Tensor, patient: bool
    ) -> None:
        self.mesh, self.last, self.shapes, self.like, self.patient = mesh, mesh.pp * chunks - 1, shapes, like, patient
        self.turns = dict[Message, int]()  # position in its receiver's list of the action that needs it
        for rank, actions in enumerate(lists):
            for turn, (kind, micro, chunk) in enumerate(actions):
                way = FORWARD if kind == "forward" else BACKWARD
                self.turns[Message(way, micro, chunk * mesh.pp + rank)] = turn
        incoming = [message for message in self.turns if self._comes(message)]
        self.awaited = [iter([message for message in incoming if message.way == way]) for way in (FORWARD, BACKWARD)]
        # The receive that is posted in each direction, or None at the end.
        self.coming = [self._post(way) for way in (FORWARD, BACKWARD)]
        self.sent: list[tuple[Message, Any, Tensor]] = []

    def receive(self, way: int, micro: int, stage: int) -> Tensor:
        coming, message = self.coming[way], Message(way, micro, stage)
        assert coming is not None, message
        self.coming[way] = self._post(way)
        work, x = coming
        work.wait()
        # Its sender has finished all earlier actions, so it has received the messages that these needed.
        source = self._source(message)
        done = self.turns[message._replace(stage=source)]
        self.let_go(lambda m: self._rank(m.stage) == self._rank(source) and self.turns[m] < done)
        return x

    def send(self, way: int, micro: int, stage: int, x: Tensor) -> None:
        message, x, rank = Message(way, micro, stage), x.detach().contiguous(), self._rank(stage)
        if self.patient and rank > 0 and len(self.sent) > 1:
            self.sent.pop(0)[1].wait()
        work = dist.isend(x, group=edge(self.mesh, way, self.mesh.pp_rank, rank), group_dst=rank)
        self.sent.append((message, work, x))

    def let_go(self, has_arrived: Callable[[Message], bool] = lambda message: True) -> None:
        """Complete the sends of messages that `has_arrived` accepts, by default all, and free their tensors."""
        for message, work, _ in self.sent:
            if has_arrived(message):
                work.wait()
        self.sent = [entry for entry in self.sent if not has_arrived(entry[0])]

    def _source(self, message: Message) -> int:
        return message.stage - 1 if message.way == FORWARD else message.stage + 1

    def _rank(self, stage: int) -> int:
        return stage % self.mesh.pp

    def _comes(self, message: Message) -> bool:
        return self._rank(message.stage) == self.mesh.pp_rank and 0 <= self._source(message) <= self.last

    def _post(self, way: int) -> tuple[Any, Tensor] | None:
        if (message := next(self.awaited[way], None)) is None:
            return None
        x, rank = self.like.new_empty(self.shapes[message.micro]), self._rank(self._source(message))
        work = dist.irecv(x, group=edge(self.mesh, way, rank, self.mesh.pp_rank), group_src=rank)
        return work, x


def edge(mesh: Mesh, way: int, source: int, target: int) -> ProcessGroup:
    around = source > target if way == FORWARD else source < target
    return mesh.edges[way + 2 * around]


def meet(mesh: Mesh, way: int, word: Tensor) -> None:
    """Send `word` once round all ranks in direction `way`, because NCCL's first message between two blocks both."""
    step = 1 if way == FORWARD else -1
    for source, target in ((rank, (rank + step) % mesh.pp) for rank in range(mesh.pp)):
        if mesh.pp_rank == source:
            dist.send(word, group=edge(mesh, way, source, target), group_dst=target)
        elif mesh.pp_rank == target:
            dist.recv(word, group=edge(mesh, way, source, target), group_src=source)


class Pipeline:
    def __init__(self, gpt: GPT, mesh: Mesh, gradients: Gradients, parallel: ParallelConfig) -> None:
        self.gpt, self.mesh, self.gradients, self.name = gpt, mesh, gradients, parallel.schedule
        # Ranks that split the tokens of a residual stream.
        self.split = mesh.tp_group.size() if mesh.tp_group is not None and parallel.sequence_parallel else 1
        self.like = gradients.shards[0]
        for way in (FORWARD, BACKWARD):
            meet(mesh, way, self.like.new_zeros(1))

    def step(self, rows: Sequence[Tensor], share: float, z_loss: float, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Run forward and backward passes of all micro-batches; `rows` has the tokens (n, T + 1) of each.

        Returns this rank's part of the batch's mean loss, (), 0 except on the last stage.

        Args:
            share: a micro-batch's share of the batch.
            scaled: multiplies a loss by the loss scale.
        """
        lists = _schedule(self.name, self.mesh.pp, len(rows), len(self.gpt.chunks))
        actions, messages = lists[self.mesh.pp_rank], self._messages(lists, rows, patient=False)
        # The last backward pass of each chunk, after which its gradients are complete.
        ends = {action.chunk: turn for turn, action in enumerate(actions) if action.kind == "backward"}
        graphs = dict[tuple[int, int], tuple[Tensor | None, list[Any]]]()
        total = torch.zeros((), dtype=self.gradients.wide, device=self.like.device)
        # The gradient of a penalty is that of the mean loss, which only the last stage computes.
        slope = scaled(total.new_full((), share))
        for turn, (kind, micro, chunk) in enumerate(actions):
            place, stage = (micro, chunk), self._stage(chunk)
            if kind == "forward":
                x, y, penalty = self._forward(messages, micro, chunk, rows[micro][:, :-1])
                if stage == messages.last:
                    loss = self.gpt.score(y, penalty, rows[micro][:, 1:], z_loss=z_loss) * share
                    total += loss.detach()
                    graphs[place] = x, [scaled(loss)]
                else:
                    messages.send(FORWARD, micro, stage + 1, y)
                    penalties = [penalty] if penalty is not None and penalty.requires_grad else []
                    graphs[place] = x, [get_gradient_edge(y), *penalties]  # not y, which is freed on arrival
                    del y
            else:
                self.gpt.announce(rows[micro][:, :-1])  # for recomputation
                with self.gradients.micro_batch(turn == ends[chunk], chunk):
                    self._backward(messages, micro, chunk, slope, *graphs.pop(place))
        messages.let_go()
        return total

    @torch.no_grad()
    def losses(self, windows: Tensor, beat: Callable[[], None], batch_tokens: int = 16384) -> Tensor:
        """Return the loss in nats summed over each row of `windows`, like `sequence_losses`; all ranks must call it."""
        rows = windows.to(self.like.device).split(max(1, batch_tokens // (windows.shape[1] - 1)))
        groups = [range(first, min(first + self.mesh.pp, len(rows))) for first in range(0, len(rows), self.mesh.pp)]
        chunks = range(len(self.gpt.chunks))
        actions = [Action("forward", micro, chunk) for group in groups for chunk in chunks for micro in group]
        messages = self._messages([actions] * self.mesh.pp, rows, patient=True)
        result = torch.zeros(len(windows), dtype=torch.float64, device=self.like.device)
        for _, micro, chunk in actions:
            beat()
            stage = self._stage(chunk)
            _, y, _ = self._forward(messages, micro, chunk, rows[micro][:, :-1])
            if stage == messages.last:
                losses = self.gpt.score(y, None, rows[micro][:, 1:], reduction="none").double().sum(1)
                result[micro * len(rows[0]) :][: len(losses)] = losses
            else:
                messages.send(FORWARD, micro, stage + 1, y)
        messages.let_go()
        dist.broadcast(result, group=self.mesh.pp_group, group_src=self.mesh.pp - 1)
        return read(result)

    def loads(self) -> Tensor:
        """Return each expert's training tokens since the last call, (blocks with experts, experts), over all stages.

        All ranks must call it.
        """
        config = self.gpt.config
        total = torch.zeros(config.depth, config.experts, dtype=torch.int64, device=self.like.device)
        if (loads := self.gpt.loads()) is not None:
            total[[number for chunk in self.gpt.chunks for number in chunk if number >= config.dense_layers]] = loads
        dist.all_reduce(total, group=self.mesh.pp_group)
        return total[config.dense_layers :]

    def _stage(self, chunk: int) -> int:
        return chunk * self.mesh.pp + self.mesh.pp_rank

    def _messages(self, lists: Lists, rows: Sequence[Tensor], *, patient: bool) -> Messages:
        width, sizes = self.gpt.config.width, [(len(part), (part.shape[1] - 1) // self.mesh.cp) for part in rows]
        shapes = [(n * time // self.split, width) if self.split > 1 else (n, time, width) for n, time in sizes]
        return Messages(lists, len(self.gpt.chunks), self.mesh, shapes, self.like, patient)

    def _forward(
        self, messages: Messages, micro: int, chunk: int, tokens: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Run a micro-batch forward through a chunk. Returns its input (None: first stage), output and any penalty."""
        stage = self._stage(chunk)
        if stage == 0:
            return None, *self.gpt.through(self.gpt.enter(tokens), tokens)
        x = messages.receive(FORWARD, micro, stage).requires_grad_(torch.is_grad_enabled())
        return x, *self.gpt.through(x, tokens, chunk)

    def _backward(
        self,
        messages: Messages,
        micro: int,
        chunk: int,
        slope: Tensor,
        x: Tensor | None,
        roots: list[Any],
    ) -> None:
        """Run a micro-batch backward through a chunk, and send on the gradient of its input x (None: first stage).

        `roots`: on the last stage the loss, else the output and any penalty, whose gradient is `slope`.
        """
        stage, slopes = self._stage(chunk), list[Tensor]()
        if stage != messages.last:
            slopes = [messages.receive(BACKWARD, micro, stage), *[slope] * (len(roots) - 1)]
        torch.autograd.backward(roots, slopes or None)
        if x is not None:
            assert x.grad is not None
            messages.send(BACKWARD, micro, stage - 1, x.grad)
