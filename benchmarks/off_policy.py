"""Off-policy estimates beside exact values: lost sales, logged from a base-stock heuristic that explores.

    python -m benchmarks.off_policy --repetitions 20
    python -m benchmarks.off_policy --repetitions 200 --episodes 1000 --jobs 2

For each repetition a log is drawn anew, and the discounted cost of ten target policies is estimated. The table has, for
each estimator, how often its 95 % interval contains the exact value, the root of the mean squared error, the rank
correlation of estimates and exact values over the policies, and how often it refused. After an interruption (Ctrl+C),
the table has the repetitions that are done.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch

from maze.core.agent.action_distribution import ExploringPolicy
from maze.core.agent.policy import Policy
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps, SubstepTable
from maze.offline.estimate import (
    BEHAVIOUR,
    ESTIMATORS,
    FITTED,
    EstimationConfig,
    PolicyEstimate,
    estimate,
    log_probabilities,
)
from maze_envs.inventory.lost_sales import SCALE, BaseStockPolicy, LostSales

GAMMA = 0.9
LEVEL, EPSILON = 16, 0.3
"""Of the heuristic that was logged."""
HORIZON, MAX_ORDER = 20, 9
SETTINGS: dict[str, Any] = {"lead_time": 2, "penalty": 9.0, "max_order": MAX_ORDER, "max_episode_steps": HORIZON}


def targets(action_spaces: Any) -> dict[str, Policy]:
    """The ten policies that are evaluated."""
    found: dict[str, Policy] = {
        f"base-stock {level}": ExploringPolicy(BaseStockPolicy(level, MAX_ORDER), 0.05, action_spaces)
        for level in (10, 12, 14, 15, 16, 17, 18, 20)
    }
    found["capped 16, 6"] = ExploringPolicy(BaseStockPolicy(16, 6), 0.05, action_spaces)
    found["behaviour"] = ExploringPolicy(BaseStockPolicy(LEVEL, MAX_ORDER), EPSILON, action_spaces)
    return found


def exact_values(problem: LostSales, policy: ExploringPolicy) -> tuple[float, float]:
    """Discounted return from the first state over an infinite horizon, and over the logged one; over all states."""
    demand, n_stock = problem.probabilities, 40
    stock, coming = (part.ravel() for part in np.indices((n_stock, MAX_ORDER + 1)))
    base = policy.base
    assert isinstance(base, BaseStockPolicy)
    seen = {"stock": np.stack([stock, coming], 1) / SCALE}
    chosen = np.clip(base.choose(seen, 0)["order"], 0, MAX_ORDER)
    probabilities = np.full((len(stock), MAX_ORDER + 1), policy.epsilon / (MAX_ORDER + 1))
    probabilities[np.arange(len(stock)), chosen] += 1.0 - policy.epsilon
    left = np.maximum(stock[:, None] - np.arange(len(demand)), 0)
    short = np.maximum(np.arange(len(demand)) - stock[:, None], 0)
    reward = -((problem.holding_cost * left + problem.penalty * short) @ demand)
    transition = np.zeros((len(stock), len(stock)))
    for order in range(MAX_ORDER + 1):
        following = np.minimum(left + coming[:, None], n_stock - 1) * (MAX_ORDER + 1) + order
        for d, probability in enumerate(demand):
            np.add.at(transition, (np.arange(len(stock)), following[:, d]), probability * probabilities[:, order])
    values = np.linalg.solve(np.eye(len(stock)) - GAMMA * transition, reward)
    logged_horizon = np.zeros(len(stock))
    for _ in range(HORIZON):
        logged_horizon = reward + GAMMA * transition @ logged_horizon
    first = round(problem.mean_demand) * (MAX_ORDER + 2)
    return float(values[first]), float(logged_horizon[first])


def logged(n_episodes: int, seed: int, epsilon: float = EPSILON) -> tuple[LoggedSteps, Any]:
    """A log of the exploring heuristic, and the action spaces."""
    problem = LostSales(n_episodes, **SETTINGS)
    for row in range(n_episodes):
        problem.seed_row(row, int(np.random.SeedSequence([seed, row]).generate_state(1)[0]))
    problem.begin(np.arange(n_episodes))
    rng = np.random.default_rng(seed)
    policy = BaseStockPolicy(LEVEL, MAX_ORDER)
    observations, actions, rewards = [], [], []
    seen = {"stock": np.zeros((n_episodes, 2), np.float32)}
    for _ in range(HORIZON):
        problem.observe(seen)
        observations.append(seen["stock"].copy())
        explores = rng.random(n_episodes) < epsilon
        order = np.where(explores, rng.integers(MAX_ORDER + 1, size=n_episodes), policy.choose(seen, 0)["order"])
        actions.append(order)
        rewards.append(problem.step({"order": order})[0])
        problem.elapsed += 1
    problem.observe(seen)
    n = n_episodes * HORIZON
    rows = np.arange(n)
    next_rows = np.where(rows % HORIZON == HORIZON - 1, n + rows // HORIZON, rows + 1)
    stock = np.concatenate([np.stack(observations, 1).reshape(n, 2), seen["stock"]])
    data = LoggedSteps(
        tables={0: SubstepTable({"stock": stock}, {"order": np.stack(actions, 1).reshape(n)})},
        step_keys=[0] * n,
        agent_ids=np.zeros(n, np.int64),
        rows=rows,
        next_rows=next_rows,
        next_step_keys=[0] * n,
        steps=rows % HORIZON,
        rewards=np.stack(rewards, 1).reshape(n),
        terminated=np.zeros(n, np.bool_),
        truncated=rows % HORIZON == HORIZON - 1,
        propensities=np.ones(n),
        episode_starts=np.arange(n_episodes + 1) * HORIZON,
    )
    spaces = problem.action_spaces
    behaviour = ExploringPolicy(policy, epsilon, spaces)
    data.propensities = np.exp(log_probabilities(data, behaviour, spaces))
    return data, spaces


def one_repetition(arguments: tuple[int, int]) -> list[PolicyEstimate]:
    """Estimate of all policies from one log."""
    n_episodes, seed = arguments
    torch.set_num_threads(1)
    data, spaces = logged(n_episodes, seed)
    return estimate(targets(spaces), data, spaces, EstimationConfig(gamma=GAMMA, seed=seed))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    problem = LostSales(1, **SETTINGS)
    policies = targets(problem.action_spaces)
    exact = {name: exact_values(problem, policy) for name, policy in policies.items()}  # type: ignore[arg-type]
    print("exact:", {name: round(values[0], 2) for name, values in exact.items()})
    begin = time.perf_counter()
    tasks = [(options.episodes, seed) for seed in range(options.first_seed, options.first_seed + options.repetitions)]
    results = []
    with ProcessPoolExecutor(options.jobs) as pool:
        try:
            for result in pool.map(one_repetition, tasks):
                results.append(result)
                fitted = [each for row in results for each in row if each.estimator == "fqe"]
                n_covered = sum(each.estimate.low <= exact[each.policy][0] <= each.estimate.high for each in fitted)
                line = f"{len(results)} repetitions: FQE covers {n_covered} of {len(fitted)}"
                print(line, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            if not results:
                raise
    seconds = time.perf_counter() - begin
    print(f"seconds of a repetition (one process): {seconds * options.jobs / len(results):.1f}")
    print(f"{'estimator':10} {'coverage':>9} {'rmse':>8} {'width':>8} {'rank':>6} {'refused':>8}")
    for name in ESTIMATORS:
        truth = {policy: values[0 if name in FITTED else 1] for policy, values in exact.items()}
        rows = [[entry for entry in result if entry.estimator == name] for result in results]
        given = [entry for row in rows for entry in row if not entry.refusal]
        refused = 1.0 - len(given) / sum(map(len, rows))
        if not given:
            print(f"{name:10} {'':>9} {'':>8} {'':>8} {'':>6} {refused:8.0%}")
            continue
        covered = np.mean([entry.estimate.low <= truth[entry.policy] <= entry.estimate.high for entry in given])
        rmse = np.sqrt(np.mean([(entry.estimate.value - truth[entry.policy]) ** 2 for entry in given]))
        width = np.mean([entry.estimate.high - entry.estimate.low for entry in given])
        ranks = [_rank_correlation(row, truth) for row in rows]
        rank = "" if np.isnan(ranks).all() else f"{np.nanmean(ranks):.3f}"  # of at least three policies
        print(f"{name:10} {covered:9.1%} {rmse:8.3f} {width:8.3f} {rank:>6} {refused:8.0%}")


def _rank_correlation(row: list[PolicyEstimate], truth: dict[str, float]) -> float:
    given = [entry for entry in row if not entry.refusal and entry.policy != BEHAVIOUR]
    if len(given) < 3:
        return float("nan")
    ours = np.argsort(np.argsort([entry.estimate.value for entry in given]))
    exact = np.argsort(np.argsort([truth[entry.policy] for entry in given]))
    return float(np.corrcoef(ours, exact)[0, 1])


if __name__ == "__main__":
    main()
