"""Lost sales learned from a log of 10,000 decisions: exact average costs of the logged heuristic and of CQL.

    python -m benchmarks.offline_lost_sales --epsilon 0.2 --seeds 0 1 2

The log is that of a base-stock policy that takes a random action with probability epsilon (0: the heuristic alone).
Action values are quadratic in the order (`ordered_heads`), or have an output for each order (`--table`).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks import off_policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.perception.weight_init import spread_zero_biases
from maze.train.trainers.offline.offline_algorithm_configs import CQLConfig
from maze.train.trainers.offline.offline_trainers import CQL
from maze_envs.inventory.exact import lost_sales_cost
from maze_envs.inventory.lost_sales import SCALE, LostSales


def learned_cost(problem: LostSales, seed: int, options: argparse.Namespace) -> float:
    """Exact average cost of the greedy policy."""
    data, action_spaces = off_policy.logged(options.decisions // off_policy.HORIZON, seed, options.epsilon)
    data.rewards = data.rewards / 10.0
    torch.manual_seed(seed)
    n_orders = problem.max_order + 1
    ordered = [] if options.table else ["order"]
    network = FlattenConcatPolicyNet({"stock": (2,)}, {"order": (n_orders,)}, [64, 64], "torch.nn.ReLU", ordered)
    network.apply(spread_zero_biases)  # as `maze-run` does
    policy = TorchPolicy({0: network}, DistributionMapper(action_spaces[0], []), "cpu", [])
    config = CQLConfig(
        alpha=options.alpha, gamma=0.95, lr=1e-3, tau=0.01, epoch_length=options.updates, rollout_evaluator=None
    )
    CQL(config, policy, data, action_spaces, seed=seed).train(n_epochs=1)

    def orders(states: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            values = network({"stock": torch.as_tensor(states / SCALE, dtype=torch.float32)})["order"]
        return values.argmax(-1).numpy()

    return lost_sales_cost(problem, orders).cost


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--decisions", type=int, default=10_000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="an output for each order")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = LostSales(1, **off_policy.SETTINGS)

    def base_stock(level: int) -> float:
        return lost_sales_cost(problem, lambda states: np.clip(level - states.sum(1), 0, problem.max_order)).cost

    best_level = min(base_stock(level) for level in range(10, 25))
    print(
        f"heuristic {base_stock(off_policy.LEVEL):.3f}, best base-stock {best_level:.3f}, optimum "
        f"{lost_sales_cost(problem).cost:.3f}"
    )
    for seed in options.seeds:
        print(f"seed {seed}: {learned_cost(problem, seed, options):.3f}", flush=True)


if __name__ == "__main__":
    main()
