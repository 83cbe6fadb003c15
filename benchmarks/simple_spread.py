"""PPO of stable-baselines3 on simple_spread, with one policy for all agents, at the steps of `simple_spread_ppo`.

    python -m benchmarks.simple_spread --seed 1 --out peer.zip
    maze-run -cn conf_compare 'policies=[peer.zip,<run of simple_spread_ppo>]' runner.n_episodes=300

Settings are those of the experiment: network, environments, minibatches, learning rate. Prints the mean return, summed
over all agents as Maze sums it, over 100 episodes with the most probable actions.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from mpe2 import simple_spread_v3
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv

N_EPISODES = 100


class AgentsSideBySide(VecEnv):
    """Each agent of several parallel environments is an environment of its own, as parameter sharing wants it.

    :param n_envs: Number of environments.
    :param seed: Of the first; the others follow.
    """

    def __init__(self, n_envs: int, seed: int) -> None:
        self._envs = [simple_spread_v3.parallel_env() for _ in range(n_envs)]
        self._seeds: list[int | None] = [seed + index for index in range(n_envs)]
        self._agents = self._envs[0].possible_agents
        agent = self._agents[0]
        self.render_mode = None
        super().__init__(
            n_envs * len(self._agents), self._envs[0].observation_space(agent), self._envs[0].action_space(agent)
        )

    def reset(self) -> np.ndarray:
        """Observations `[n_envs * n_agents, n_features]`."""
        rows = [row for index in range(len(self._envs)) for row in self._begun(index)]
        return np.stack(rows)

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions."""
        self._actions = actions.reshape(len(self._envs), len(self._agents))

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step all environments and reset finished ones."""
        rows, rewards, dones, infos = [], [], [], []
        for index, (env, actions) in enumerate(zip(self._envs, self._actions, strict=True)):
            seen, earned, terminated, truncated, _ = env.step(dict(zip(self._agents, actions.tolist(), strict=True)))
            is_over = not env.agents
            last = [seen[agent] for agent in self._agents]
            rows += self._begun(index) if is_over else last
            rewards += [earned[agent] for agent in self._agents]
            dones += [is_over] * len(self._agents)
            for agent, observation in zip(self._agents, last, strict=True):
                is_cut_off = truncated[agent] and not terminated[agent]
                infos.append(
                    {"terminal_observation": observation, "TimeLimit.truncated": is_cut_off} if is_over else {}
                )
        return np.stack(rows), np.array(rewards, np.float32), np.array(dones), infos

    def _begun(self, index: int) -> list[np.ndarray]:
        observations, _ = self._envs[index].reset(seed=self._seeds[index])
        self._seeds[index] = None
        return [observations[agent] for agent in self._agents]

    def close(self) -> None:
        """Nothing to release."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same for all."""
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Not used."""

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Not used."""
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """They are not."""
        return [False] * self.num_envs


def mean_return(model: PPO, seed: int) -> tuple[float, float]:
    """Mean and standard error of the summed return, with the most probable actions."""
    env = simple_spread_v3.parallel_env()
    returns = []
    for episode in range(N_EPISODES):
        seen, _ = env.reset(seed=seed + episode)
        total = 0.0
        while env.agents:
            actions, _ = model.predict(np.stack([seen[agent] for agent in env.agents]), deterministic=True)
            seen, earned, *_ = env.step(dict(zip(env.agents, actions.tolist(), strict=True)))
            total += sum(earned.values())
        returns.append(total)
    return float(np.mean(returns)), float(np.std(returns) / np.sqrt(N_EPISODES))


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400_000, help="environment steps")
    parser.add_argument("--out", default="simple_spread.zip", help="file of the model, which acts in Maze as well")
    arguments = parser.parse_args()
    env = AgentsSideBySide(16, arguments.seed)
    n_agents = env.num_envs // 16
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=100,
        batch_size=400 * n_agents,
        n_epochs=5,
        learning_rate=lambda left: 0.0007 * left,
        gamma=0.95,
        gae_lambda=0.95,
        ent_coef=0.01,
        seed=arguments.seed,
        device="cpu",
    )
    start = time.process_time()
    model.learn(arguments.steps * n_agents)
    model.save(arguments.out)
    mean, error = mean_return(model, 10_000)
    print(
        f"return {mean:.2f} ± {error:.2f} after {arguments.steps:,} steps, {time.process_time() - start:.0f} s of CPU"
    )


if __name__ == "__main__":
    main()
