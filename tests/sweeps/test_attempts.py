"""Decisions on retries: whether, when and where a run is tried again after its attempts."""

from __future__ import annotations

import random

from isoflop.sweeps.runs.attempts import CAUSES, INTERRUPTED, LONGEST_WAIT, ON_NODE, RETRIED, Attempt, Policy, decide


def make_attempt(number: int, cause: str, host: str | None = "node1", ended: float = 0.0) -> Attempt:
    return Attempt(
        attempt=number, began=ended - 60, ended=ended, seconds=60.0, host=host, job_id="7", cause=cause, reason=None,
        first_step=0, last_step=0, saved_step=0, flops=0.0, flops_wasted=0.0,
    )  # fmt: skip


def history(*causes: str) -> list[Attempt]:
    return [make_attempt(number, cause) for number, cause in enumerate(causes, 1)]


def random_history(rng: random.Random, causes: tuple[str, ...] = CAUSES) -> list[Attempt]:
    return [
        make_attempt(number, rng.choice(causes), rng.choice(["node1", "node2", "node3", None]), 100.0 * number)
        for number in range(1, rng.randint(1, 12) + 1)
    ]


def test_all_runs_together_have_as_many_retries_as_the_sweeps_budget_says() -> None:
    policy = Policy(sweep_retries=2)
    decisions = [decide(history("killed"), policy, spent, 0.0) for spent in range(4)]
    assert [decision.again for decision in decisions] == [True, True, False, False]
    assert "cluster.sweep_retries" in decisions[2].why
    assert decide(history("preempted"), policy, 99, 0.0).again  # a preempted run uses no retry


def test_the_pause_doubles_and_counts_from_the_end_of_the_last_attempt() -> None:
    policy = Policy(backoff_seconds=30.0, retries=99)
    pauses = [decide(history(*["killed"] * n), policy, 0, now=0.0).wait_seconds for n in range(1, 10)]
    assert pauses[:4] == [30, 60, 120, 240]
    assert pauses[-1] == LONGEST_WAIT
    assert [decide(history("lost", "disk"), policy, 0, now).wait_seconds for now in (20.0, 60.0, 1e9)] == [40, 0, 0]
    # The end may be later than `now` on another machine's clock, which must not lengthen the pause.
    assert decide(history("killed"), policy, 0, now=-1e6).wait_seconds == 30
    assert decide(history(*["killed"] * 5000), Policy(retries=10**6), 0, 0.0).wait_seconds == LONGEST_WAIT


def test_random_histories_keep_to_every_rule() -> None:
    rng = random.Random(1)
    retries = 0
    for _ in range(2000):
        attempts = random_history(rng)
        policy = Policy(*(rng.randint(0, 4) for _ in range(3)), rng.choice([0.0, 1.0, 30.0]))
        spent, now = rng.randint(0, 4), attempts[-1].ended + rng.uniform(0, 500)
        decision = decide(attempts, policy, spent, now)
        last = attempts[-1]
        causes = [attempt.cause for attempt in attempts]
        failed, stopped = sum(c in RETRIED for c in causes), sum(c in INTERRUPTED for c in causes)
        allowed = (
            (last.cause in RETRIED and failed <= policy.retries and spent < policy.sweep_retries)
            or (last.cause in INTERRUPTED and stopped <= policy.max_requeues)
            or (last.cause == "memory" and causes.count("memory") == 1)
        )
        assert decision.again == allowed
        retries += allowed
        assert 0 <= decision.wait_seconds <= policy.backoff_seconds * 2 ** max(0, failed - 1)
        if not (decision.again and last.cause in RETRIED):
            assert decision.wait_seconds == 0
        elif decision.wait_seconds > 0:  # after this wait no further wait follows
            assert decide(attempts, policy, spent, now + decision.wait_seconds).wait_seconds == 0
        assert len(set(decision.avoid)) == len(decision.avoid)
        at_fault = [a.host for a in attempts if a.cause in ON_NODE and a.host]
        assert set(decision.avoid) == set(at_fault)
        assert not at_fault or decision.avoid[-1] == at_fault[-1]
    assert 300 < retries < 1700  # both decisions occur often
