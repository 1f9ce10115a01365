"""Which (tp, dp, ZeRO stage, micro-batch, recompute) a run should use on so many ranks: the fastest that fits, and why.

Every combination that the model and the batch allow is costed in closed form (`memory.py`, `cost.py`), so a plan takes
milliseconds and starts nothing. A combination fits when its peak stays within the device's memory less a margin, which
stands for what no formula sees: the CUDA context, NCCL's buffers, and blocks that the allocator cannot use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..config import ParallelConfig, RunConfig
from ..errors import UserError
from ..memory import Memory, memory
from .cost import Hardware, StepTime, step_time
from .shapes import check_shapes, working_shapes

MARGIN = 0.10  # share of the device's memory that a plan leaves free
TIE = 0.01  # times that differ by less are equal, for the formulas are no better
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """One way to spread a run, with what it takes."""

    parallel: ParallelConfig
    memory: Memory
    time: StepTime

    @property
    def name(self) -> str:
        """All that was chosen, in the words of the config."""
        chosen = self.parallel
        return (
            f"tp={chosen.tp} dp={chosen.dp} zero={chosen.zero} micro_batch_size={chosen.micro_batch_size} "
            f"recompute={chosen.recompute}"
        )

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders what takes equally long: least split first, then the largest micro-batches, whose kernels are few."""
        chosen = self.parallel
        return chosen.tp, chosen.zero, RECOMPUTE.index(chosen.recompute), -(chosen.micro_batch_size or 0)


@dataclass(frozen=True)
class Choice:
    """What was chosen of everything that is possible, and why."""

    config: RunConfig  # as it was asked about
    ranks: int
    hardware: Hardware
    margin: float
    candidates: list[Candidate]  # fastest first

    @property
    def limit(self) -> float:
        """Bytes that a rank may use."""
        return self.hardware.memory_bytes * (1 - self.margin)

    @cached_property
    def best(self) -> Candidate | None:
        """Of the fastest that fit the simplest; None where nothing fits."""
        fitting = [candidate for candidate in self.candidates if self.fits(candidate)]
        if not fitting:
            return None
        limit = fitting[0].time.total * (1 + TIE)
        return min((c for c in fitting if c.time.total <= limit), key=lambda c: c.complexity)

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate's peak stays within the limit."""
        return candidate.memory.peak <= self.limit

    def verdict(self, candidate: Candidate) -> str:
        """In a few words: chosen, or why not."""
        best = self.best
        if not self.fits(candidate):
            return f"needs {gigabytes(candidate.memory.peak - self.limit)} more than there is"
        assert best is not None
        if candidate is best:
            return "chosen"
        slower = candidate.time.total / best.time.total - 1
        return f"{slower:.0%} slower" if slower > TIE else "as fast, and less simple"

    def why(self) -> str:
        """The choice in a sentence or three."""
        best, fitting = self.best, [candidate for candidate in self.candidates if self.fits(candidate)]
        room = f"{gigabytes(self.hardware.memory_bytes)} less {self.margin:.0%}"
        if best is None:
            least = min(self.candidates, key=lambda candidate: candidate.memory.peak)
            return (
                f"Nothing fits into {room}: of {len(self.candidates)} ways the smallest, {least.name}, needs "
                f"{gigabytes(least.memory.peak)}."
            )
        said = (
            f"{best.name} is the fastest of the {len(fitting)} of {len(self.candidates)} ways that fit into {room}: "
            f"{best.time.total:.3g} s a step and {gigabytes(best.memory.peak)} a rank."
        )
        slower = next((c for c in fitting if c.time.total > best.time.total * (1 + TIE)), None)
        if slower is not None:
            said += f" The next, {slower.name}, is {self.verdict(slower)}."
        faster = self.candidates[0]
        if faster.time.total < best.time.total * (1 - TIE):
            said += f" {faster.name} would take {faster.time.total:.3g} s, but {self.verdict(faster)}."
        return said

    def notable(self) -> list[Candidate]:
        """The candidates worth a line, fastest first: of every (tp, ZeRO stage) the fastest that fits, and the fastest
        that does not where it would beat the choice.
        """
        seen: set[tuple[int, int, bool]] = set()
        lines = []
        for candidate in self.candidates:
            fits = self.fits(candidate)
            kind = (candidate.parallel.tp, candidate.parallel.zero, fits)
            beaten = not fits and self.best is not None and candidate.time.total > self.best.time.total
            if kind not in seen and (candidate is self.best or not beaten):
                seen.add(kind)
                lines.append(candidate)
        return lines


def choose(config: RunConfig, ranks: int, hardware: Hardware, margin: float = MARGIN) -> Choice:
    """Costs every way to spread a run over `ranks` ranks.

    Args:
        config: complete; its tp, dp, zero, micro_batch_size and recompute are not read, everything else is.
        ranks: of the job.
        hardware: what a rank has.
        margin: share of the device's memory to leave free, at least 0 and below 1.

    Raises:
        UserError: a number is out of range, or no shape divides this model and batch.
    """
    if ranks < 1:
        raise UserError(f"ranks is {ranks}; it must be 1 or more")
    for name, value in dataclasses.asdict(hardware).items():
        if name not in ("latency", "device") and not value > 0:
            raise UserError(f"{name} is {value:g}; it must be greater than 0")
    if not 0 <= margin < 1:
        raise UserError(f"margin is {margin}; it must be at least 0 and below 1")
    candidates = []
    for parallel in ways(config, ranks, hardware.ranks_per_node):
        spread = dataclasses.replace(config, parallel=parallel)
        candidates.append(Candidate(parallel, memory(spread, hardware.device), step_time(spread, hardware)))
    candidates.sort(key=lambda candidate: (candidate.time.total, candidate.complexity))
    return Choice(config, ranks, hardware, margin, candidates)


def ways(config: RunConfig, ranks: int, ranks_per_node: int) -> Iterator[ParallelConfig]:
    """Every setting that divides the model and the batch; tp inside a node.

    Raises:
        UserError: there is none.
    """
    found = False
    for micro in divisors(config.optimizer.batch_size):
        asked = dataclasses.replace(config.parallel, micro_batch_size=micro, zero=0)
        for tp, dp in working_shapes(dataclasses.replace(config, parallel=asked), ranks, min(ranks, ranks_per_node)):
            found = True
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for recompute in RECOMPUTE:
                    yield dataclasses.replace(asked, tp=tp, dp=dp, zero=zero, recompute=recompute)
    if not found:
        plain = dataclasses.replace(config.parallel, tp=1, dp=ranks, zero=0, micro_batch_size=1)
        check_shapes(dataclasses.replace(config, parallel=plain))


def divisors(number: int) -> list[int]:
    """Of a positive number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def gigabytes(size: float) -> str:
    """Bytes for a reader, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
