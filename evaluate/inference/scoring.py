"""Log-probabilities of continuations after their prefixes; what requests share is computed once.

Requests are packed as trees of tokens (`trees.py`). The last block and the logits are computed only for tokens that a
request reads. If memory runs out, the batch is halved. Sums over tokens are float64, so batching changes only the
rounding of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...train.errors import UserError
from ...train.hardware import on_gpu, read
from ...train.model.attention import causal_attention
from ...train.model.gpt import GPT
from .forward import Attend, Forward, attention_by_sequence, unless_out_of_memory
from .trees import Costs, Request, Tree, plan_trees, tree_batches

Score = tuple[float, bool]  # (nats, whether greedy decoding would write it)
Done = Callable[[list[tuple[int, Score]]], None]  # called with (place, score) of finished requests

LOGITS_A_TOKEN = 1024  # entries of logits held at a time, for each token of the budget
# An operation of masked attention takes longer than one of a matrix product. 10 was fastest for few-shot prompts on a
# CPU; 3 and 12 were within a fifth.
ATTENTION_SLOWNESS = 10.0
LARGEST_TREE = 8192  # tokens; the mask has the square of that


class Scorer:
    """Scores requests with a GPT. `batch_tokens` bounds rows times length of one pass; a longer request runs alone."""

    def __init__(
        self, model: GPT, device: str | torch.device, batch_tokens: int, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.model, self.device, self.batch_tokens = model, torch.device(device), batch_tokens
        self._forward, self._say = Forward(model), say
        config = model.config
        block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        # Of one block: two operations per weight, and two products over half of the pairs of tokens (causal).
        self._costs = Costs(token=2 * block, pair=2 * ATTENTION_SLOWNESS * config.heads * config.head_dim)

    def score(self, requests: Sequence[Request], done: Done | None = None) -> list[Score]:
        """Return, per request, the log-probability of its continuation in nats, and whether greedy decoding writes it.

        `done` is called after every batch. Raises UserError if a single request does not fit the memory.
        """
        results: dict[int, Score] = {}
        while waiting := [place for place in range(len(requests)) if place not in results]:
            for batch in tree_batches(self._plan(requests, waiting), self.batch_tokens):
                scored = self._try(requests, batch)
                if scored is None:
                    break  # the rest is planned again for a smaller budget
                results.update(scored)
                if done is not None:
                    done(scored)
        return [results[place] for place in range(len(requests))]

    def _plan(self, requests: Sequence[Request], waiting: Sequence[int]) -> list[Tree]:
        largest = min(self.batch_tokens, LARGEST_TREE)
        return plan_trees(requests, waiting, self._costs, largest, self.model.end_of_document)

    def _try(self, requests: Sequence[Request], batch: list[Tree]) -> list[tuple[int, Score]] | None:
        scored = unless_out_of_memory(lambda: self._isolated(requests, batch), self.device)
        if scored is not None:
            return scored
        longest = max(map(len, batch))
        if len(batch) == 1 and len(batch[0].scored) == 1 and self.batch_tokens <= longest:
            raise UserError(
                f"memory ran out on {self.device} for one request of {longest} tokens; use precision=bf16 or a machine "
                "with more memory"
            )
        # The size of a batch that did not fill its budget is a better estimate than the budget.
        self.batch_tokens = max(1, min(self.batch_tokens, len(batch) * longest) // 2)
        self._say(f"memory ran out; batch_tokens is {self.batch_tokens} from now on")
        return None

    def _isolated(self, requests: Sequence[Request], batch: list[Tree]) -> list[tuple[int, Score]]:
        """Score a batch; return (request index, score) pairs.

        A NaN reaches other requests of its tree through the mask, so a request with NaN in a shared tree is scored
        again alone.
        """
        scored = self._pass(batch)
        company = {one.place for tree in batch if len(tree.scored) > 1 for one in tree.scored}
        return [
            self._pass(self._plan(requests, [place]))[0] if np.isnan(score[0]) and place in company else (place, score)
            for place, score in scored
        ]

    @torch.inference_mode()
    def _pass(self, batch: list[Tree]) -> list[tuple[int, Score]]:
        tokens = self._put(np.concatenate([tree.tokens for tree in batch]))
        positions = self._put(np.concatenate([tree.positions for tree in batch]))
        starts = np.cumsum([0, *map(len, batch)])
        scored = [one for tree in batch for one in tree.scored]
        nodes = [one.nodes + start for tree, start in zip(batch, starts, strict=False) for one in tree.scored]
        # (u,) tokens whose logits are read, and which of them each target (p,) reads.
        read, reader = np.unique(np.concatenate(nodes), return_inverse=True)
        attention = _attention(batch, self.model, self.device, places := self._put(read))
        hidden = self._forward.hidden(tokens, positions, attention, places)  # (u, width)
        nats, hits = self._targets(hidden, reader, np.concatenate([one.targets for one in scored]))
        firsts = np.cumsum([0, *(len(one.targets) for one in scored)])[:-1]
        sums, greedy = np.add.reduceat(nats, firsts), np.logical_and.reduceat(hits, firsts)
        return [(one.place, (float(s), bool(g))) for one, s, g in zip(scored, sums, greedy, strict=True)]

    def _targets(self, hidden: Tensor, reader: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each target's log-probability, and whether it is the likeliest token, (p,) each.

        Row `reader[i]` of `hidden` (u, width) predicts target i.
        """
        order = np.argsort(reader, kind="stable")
        rising, ids = reader[order], self._put(targets[order])
        rows = max(1, self.batch_tokens * LOGITS_A_TOKEN // self.model.head.vocab_size)
        nats, hits = [], []
        for start in range(0, len(hidden), rows):
            low, high = np.searchsorted(rising, (start, start + rows))
            logits = self._forward.logits(hidden[start : start + rows])  # (rows, V)
            log_p, is_likeliest = _read(logits, self._put(rising[low:high] - start), ids[low:high])
            nats.append(log_p)
            hits.append(is_likeliest)
        back = np.argsort(order)
        return read(torch.cat(nats).double()).numpy()[back], read(torch.cat(hits)).numpy()[back]

    def _put(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.device)


def _read(logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability, and whether it is the argmax, (p,) each. Target i uses row `rows[i]`."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nats = torch.log_softmax(logits, dim=1)[rows, targets]  # half the time of logsumexp on CPUs
    hits = logits[rows, targets] == logits.amax(dim=1)[rows]
    if on_gpu(logits):  # `nonzero` would wait for the GPU
        return nats, hits & (logits.argmax(dim=1)[rows] == targets)
    some = hits.nonzero()[:, 0]  # argmax takes 20 times as long as amax
    hits[some] = logits[rows[some]].argmax(dim=1) == targets[some]
    return nats, hits


def _attention(batch: list[Tree], model: GPT, device: torch.device, read: Tensor) -> Attend:
    window = model.config.window
    narrow = window is not None and any(int(tree.positions.max()) >= window for tree in batch)
    masked = narrow or any(tree.branches or tree.documents.any() for tree in batch)
    if masked and not on_gpu(device):
        return _one_by_one(batch, model, device, read)
    return _side_by_side(batch, model, device, read, masked)


def _mask(batch: list[Tree], longest: int, model: GPT, device: torch.device) -> Tensor:
    """Return a mask to add to attention scores, 0 or -inf: (trees, 1, longest, longest)."""
    # Padding sees itself and earlier padding: a row of nothing but -inf would be NaN.
    ends = _padded([tree.ends for tree in batch], longest, device)
    index = torch.arange(longest, dtype=torch.int32, device=device)
    seen = (index[:, None] >= index) & (index[:, None] < ends[:, None, :])
    positions = _padded([tree.positions for tree in batch], 0, device)
    if (window := model.config.window) is not None:
        seen &= positions[:, :, None] - positions[:, None, :] < window
    if any(tree.documents.any() for tree in batch):
        documents = _padded([tree.documents for tree in batch], 0, device)
        seen &= positions[:, None, :] >= documents[:, :, None]
    mask = torch.zeros(seen.shape, dtype=model.embedding.weight.dtype, device=device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None]


def _padded(parts: list[np.ndarray], value: int, device: torch.device) -> Tensor:
    rows = [torch.from_numpy(part) for part in parts]
    return pad_sequence(rows, batch_first=True, padding_value=value).to(device, torch.int32)


def _one_by_one(batch: list[Tree], model: GPT, device: torch.device, read: Tensor) -> Attend:
    lengths = [len(tree) for tree in batch]
    ends = np.cumsum(lengths)
    read_of_each = np.diff(np.searchsorted(read.numpy(), [0, *ends])).tolist()
    masks = [_mask([tree], len(tree), model, device) for tree in batch]
    starts = torch.from_numpy(np.repeat(ends - lengths, read_of_each))
    rows = zip(masks, (read - starts).split(read_of_each), strict=True)
    masks_of_read = [mask[:, :, places] for mask, places in rows]

    def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        few = len(query) < len(key)
        asking, seen = (read_of_each, masks_of_read) if few else (lengths, masks)
        return attention_by_sequence(query, key, value, asking, lengths, seen)

    return attend


def _side_by_side(batch: list[Tree], model: GPT, device: torch.device, read: Tensor, masked: bool = True) -> Attend:
    """Return an `Attend` function that pads a batch to one tree per row.

    In the last block only the tokens `read` have queries. Unless `masked`, attention is plainly causal.
    """
    sizes = np.array([len(tree) for tree in batch])
    longest = int(sizes.max())
    column, starts = np.arange(longest), np.cumsum(sizes) - sizes
    # The place of each token in the padded batch, and the token of each place. Padding is a copy of the row's last
    # token: NaN passes masks, and must stay in its row.
    places = torch.from_numpy(np.flatnonzero(column < sizes[:, None])).to(device)
    source = torch.from_numpy((starts[:, None] + np.minimum(column, sizes[:, None] - 1)).ravel()).to(device)
    is_padded = len(places) < len(source)
    mask = _mask(batch, longest, model, device) if masked else None

    def in_rows(x: Tensor) -> Tensor:
        x = x.index_select(0, source) if is_padded else x
        return x.view(len(batch), longest, *x.shape[1:]).transpose(1, 2)

    def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        few = len(query) < len(key)
        if few:  # the other queries are zeros
            query = query.new_zeros(len(key), *query.shape[1:]).index_copy_(0, read, query)
        mixed = causal_attention(in_rows(query), in_rows(key), in_rows(value), mask).transpose(1, 2).flatten(0, 1)
        mixed = mixed.index_select(0, places) if is_padded else mixed
        return mixed.index_select(0, read) if few else mixed

    return attend
