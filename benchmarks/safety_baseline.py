"""PPO-Lagrangian of FSRL on SafetyBallRun-v0, to compare with `benchmarks/constraints.py safety` at equal steps.

FSRL needs gymnasium 0.28 and NumPy 1, and thus an environment of its own:

    pip install torch "numpy<2" fast-safe-rl bullet-safety-gym
    pip install --no-deps "setuptools<70"
    python benchmarks/safety_baseline.py --seeds 1 2 3

The settings are FSRL's defaults for this suite (fsrl.config.ppol_cfg): cost limit 10, 20 episodes per update.
"""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import Any


class _Silent(ModuleType):
    """Stands in for `wandb`, which FSRL imports and which nothing here needs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=12, help="of 10,000 steps; FSRL's default for the suite is 100")
    options = parser.parse_args()
    sys.modules.setdefault("wandb", _Silent("wandb"))
    import bullet_safety_gym  # noqa: F401  # registers the environments
    import gymnasium
    from fsrl.agent import PPOLagAgent
    from tianshou.env import DummyVectorEnv

    def make() -> Any:
        return gymnasium.make("SafetyBallRun-v0")

    for seed in options.seeds:
        agent = PPOLagAgent(make(), cost_limit=10, thread=1, seed=seed, max_grad_norm=0.5)
        train_envs, test_envs = DummyVectorEnv([make] * 20), DummyVectorEnv([make] * 2)
        agent.learn(
            train_envs, test_envs, epoch=options.epochs, batch_size=256, reward_threshold=1e9, save_ckpt=False,
            verbose=False, show_progress=False,
        )  # fmt: skip
        found = [agent.evaluate(test_envs, eval_episodes=2) for _ in range(50)]
        returns, costs = ([float(each[part].mean()) for each in found] for part in (0, 2))
        print(f"seed {seed}: return {sum(returns) / 50:.1f}, cost {sum(costs) / 50:.1f} (100 episodes)", flush=True)


if __name__ == "__main__":
    main()
