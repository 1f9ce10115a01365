"""The mixture grid: domain weights spread over the simplex, the base mixture's noise, and each domain made heavier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...train.config import DomainConfig, RunConfig, mixture_label, run_id
from ...train.errors import UserError, counted
from ...train.fields import Natural4
from ...train.flops import flops_exact
from ...train.planner.validation import check_shares
from ..plan.trunks import merge_runs, trained_flops
from ..prepare import resolved_base
from ..runs.membership import members
from .expand import expand_grid
from .ladder import LadderGrid
from .product import PointsGrid
from .tuning import Tuner

if TYPE_CHECKING:
    from ..config import SweepConfig
    from ..runs.directory import SweepDirectory
    from .suggest import Suggestion

PARTS = 10_000  # a weight is a whole number of parts of 1 / PARTS
REPEATS = 3  # seeds of the base, whose losses give the noise; grid.seeds replaces them


@dataclass
class MixtureGrid(LadderGrid):
    """Mixtures of data.domains at every (N, D) of a ladder: the base thrice, each domain heavier, and a swarm.

    The swarm follows a Dirichlet distribution with parameters (1 + K base) / 2 for K domains: uniform on the simplex if
    the base is uniform, else drawn halfway to the base. No parameter is below 1/2, so domains that are rare in the base
    vary too; RegMix (Liu et al. 2024, arXiv:2407.01492) flattens the base for the same reason. RegMix and olmix draw
    at random, and a Sobol sequence fills the simplex more evenly.
    """

    kind: str = "mixture"
    mixtures: Natural4 = 16  # points of the swarm; a larger number keeps those of a smaller one
    base: Any = None  # {domain: weight}, the others 0; None: the weights of data.domains. For Any see ProductGrid.axes.
    bounds: Any = None  # {domain: [low, high]}: shares that every mixture keeps; a domain without bounds has [0, 1]

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        simplex = Simplex.of(base.data.domains or {}, self.base, self.bounds)
        others = [*map(simplex.heavier, range(len(simplex.base))), *simplex.swarm(self.mixtures, base.seed)]
        points = [(simplex.base, base.seed + i) for i in range(REPEATS)] + [(parts, base.seed) for parts in others]
        for run in super().runs(base, tuner):
            yield from (weighted(run, parts, seed) for parts, seed in points)

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        return []  # those of a ladder are on laws of N and D

    def suggest(
        self, sweep: SweepDirectory, config: SweepConfig, budget: float, max_flops: float, max_runs: int
    ) -> Suggestion:
        """Suggest mixtures that a law would learn most from, then the swarm's next, at all (N, D) up to `max_flops`."""
        from ...fit import InputError, MixtureLaw
        from ..results.table import build_table
        from .suggest import NothingToSuggest, Suggestion, point_of, suggested_run

        base = replace(resolved_base(sweep, config), tokens=0)
        domains, table = base.data.domains or {}, build_table(sweep)
        shapes = [run for run in LadderGrid.runs(self, base, Tuner(config.tuning)) if flops_exact(run) <= max_flops]
        repeats = len(self.seeds or [base.seed]) * len(self.recipes or [base.data.recipe])
        price = repeats * trained_flops(shapes)
        if not 0 < price <= budget:
            needed = f"one more mixture needs {price:.3g}" if shapes else f"every run needs more than {max_flops:.3g}"
            raise NothingToSuggest(f"budget is {budget:.3g} FLOPs, and {needed}; give at least that")
        count = int(min(budget / price, max(1, max_runs // (repeats * len(shapes)))))
        limits = dict(self.bounds or {})
        for name, domain in domains.items():
            if domain.max_epochs and f"unique_{name}" in table:
                low, high = limits.get(name, (0, 1))
                limit = domain.max_epochs * float((table[f"unique_{name}"] / table["D"]).min()) - 1 / PARTS
                if limit < high:  # a heavier domain would be repeated too often
                    limits[name] = [low, max(low, limit)]
        simplex, proposed = Simplex.of(domains, self.base, limits), list[list[int]]()
        try:
            answer = MixtureLaw().fit(table[table["final"]]).best(base.data.target, bounds=limits)
            proposed = [_rounded([PARTS * m[name] for name in domains], simplex.low, simplex.high) for m in answer.next]
            reason = f"by the law of the finished runs, the lowest loss is at {mixture_label(answer.weights)}; the "
            reason += f"first {counted(len(proposed), 'mixture')} would tell most about it"
        except InputError as error:
            reason = f"these mixtures are the next of the grid's swarm; the finished runs give no law yet: {error}"
        present = [run.config().data.domains or {} for run in members(sweep)]
        taken = [[round(PARTS * domain.weight) for domain in mixture.values()] for mixture in present]
        proposed += simplex.swarm(len(taken) + count, base.seed)
        fresh = [parts for parts in proposed if parts not in taken][:count]
        points = [point_of(weighted(run, parts, base.seed), base) for parts in fresh for run in shapes]
        grid = PointsGrid(points=points, seeds=self.seeds, recipes=self.recipes)
        runs = expand_grid(grid, base, config.tuning)
        names = {run_id(run): str(run.name) for run in runs}
        suggested = [suggested_run(run, names) for run in merge_runs(runs).runs]
        flops = sum(run.flops_own for run in suggested)
        return Suggestion(budget, None, suggested, flops, [], {}, {}, asdict(grid), reason)

    @classmethod
    def results(cls, sweep: SweepDirectory) -> dict[str, Any]:
        from ..results.finish import write_mixture  # not needed to plan

        return write_mixture(sweep)


@dataclass(frozen=True)
class Simplex:
    """The mixtures within bounds, each as its domains' parts of PARTS, in the order of data.domains."""

    base: list[int]
    low: list[int]
    high: list[int]

    @classmethod
    def of(cls, domains: Mapping[str, DomainConfig], base: Any = None, bounds: Any = None) -> Simplex:
        """Return the simplex of some domains, with `base` and `bounds` as in MixtureGrid."""
        if len(domains) < 2:
            needs = "data=mixture and at least two, such as data.domains={code:{path:code/},prose:{path:prose/}}"
            raise UserError(f"data.domains has {counted(len(domains), 'domain')}; a mixture grid needs {needs}")
        configured = {name: domain.weight for name, domain in domains.items()}
        where, weights = ("data.domains", configured) if base is None else ("grid.base", base)
        check_shares(where, weights, domains)
        shares = [PARTS * weights.get(name, 0.0) / sum(weights.values()) for name in domains]
        limits = {} if bounds is None else bounds
        if not isinstance(limits, dict) or not all(name in domains and _is_interval(limits[name]) for name in limits):
            accepted = f"it must map domains ({', '.join(domains)}) to [low, high] with 0 <= low <= high <= 1"
            raise UserError(f"grid.bounds is {bounds}; {accepted}")
        low, high = ([round(PARTS * limits.get(name, (0, 1))[end]) for name in domains] for end in (0, 1))
        if not sum(low) <= PARTS <= sum(high):
            accepted = "the lows must sum to at most 1, and the highs (1 without bounds) to at least 1"
            raise UserError(f"grid.bounds is {bounds}, which leaves no mixture; {accepted}")
        for name, share, lowest, highest in zip(domains, shares, low, high, strict=True):
            if not lowest - 1 < share < highest + 1:
                remedy = f"it must contain the share in {where}, {share / PARTS:.4g}; or give another grid.base"
                raise UserError(f"grid.bounds.{name} is {limits[name]}; {remedy}")
        return cls(_rounded(shares, low, high), low, high)

    def heavier(self, domain: int) -> list[int]:
        """Return the mixture halfway from the base to this domain alone, or as near to it as the bounds allow."""
        low, base = self.low.copy(), self.base
        low[domain] = 0
        share = min((PARTS + base[domain]) / 2, self.high[domain], PARTS - sum(low))
        spare = sum(base) - base[domain] - sum(low)
        scale = (PARTS - share - sum(low)) / spare if spare else 0.0
        shares = [lowest + (part - lowest) * scale for part, lowest in zip(base, low, strict=True)]
        shares[domain] = share
        return _rounded(shares, self.low, self.high)

    def swarm(self, count: int, seed: int) -> Iterator[list[int]]:
        """Yield the first points of the grid's swarm."""
        from scipy import special
        from scipy.stats import qmc

        shapes = [(1 + len(self.base) * part / PARTS) / 2 for part in self.base]
        later = [sum(shapes[i + 1 :]) for i in range(len(shapes))]

        # A coordinate is a quantile of a domain's share of the undivided parts: a Beta law, cut to the bounds.
        def choose(point: Sequence[float], i: int, left: int, lowest: int, highest: int) -> float:
            start, end = special.betainc(shapes[i], later[i], [lowest / left, highest / left])
            return left * float(special.betaincinv(shapes[i], later[i], start + (end - start) * point[i]))

        for point in qmc.Sobol(len(shapes) - 1, seed=seed).random_base2((count - 1).bit_length())[:count]:
            yield _divided(self.low, self.high, partial(choose, point))


def weighted(run: RunConfig, parts: Sequence[int], seed: int) -> RunConfig:
    """Return a run with these parts as its domains' weights."""
    pairs = zip(run.data.domains.items(), parts, strict=True)
    domains = {name: replace(domain, weight=part / PARTS) for (name, domain), part in pairs}
    return replace(run, data=replace(run.data, domains=domains), seed=seed)


def _is_interval(bound: Any) -> bool:
    numbers = isinstance(bound, list | tuple) and all(isinstance(end, int | float) for end in bound)
    return numbers and len(bound) == 2 and 0 <= bound[0] <= bound[1] <= 1


def _rounded(shares: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Round shares of PARTS to whole parts within bounds; each changes by less than 1 where the bounds allow."""
    ends = list(accumulate(shares))
    return _divided(low, high, lambda i, left, *_: ends[i] - (PARTS - left))


def _divided(low: Sequence[int], high: Sequence[int], choose: Callable[[int, int, int, int], float]) -> list[int]:
    """Divide PARTS: domain i gets choose(i, left, lowest, highest), rounded, within what the bounds allow."""
    parts, left = list[int](), PARTS
    for i in range(len(low)):
        lowest, highest = max(low[i], left - sum(high[i + 1 :])), min(high[i], left - sum(low[i + 1 :]))
        share = lowest if lowest == highest else round(choose(i, left, lowest, highest))
        parts.append(min(max(share, lowest), highest))
        left -= parts[-1]
    return parts
