"""The documented imitation example and fine-tuning: returns relative to the clone.

For each seed: three episodes of the heuristic, behavioural cloning with half of their steps kept for validation, and
fine-tuning with PPO and with SAC by the shipped experiments, all through the command line. Every policy of the
fine-tuning (each epoch's, not only the best) then plays the same episodes as the clone, with most probable actions.

    python benchmarks/imitation.py                       # PPO and SAC, three seeds
    python benchmarks/imitation.py --algorithms ppo --seeds 1 --json imitation.json

Exit status 1 when the clone's accuracy or return, or the share of its return that fine-tuning keeps, misses its goal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

ENV = "LunarLander-v3"
MIN_ACCURACY = 0.9
MIN_SHARE = 0.9
FIRST_EPISODE_SEED = 987_654
N_ENVS = 25
VECTOR_MODEL = ("model=vector_obs", "wrappers=vector_obs")


@dataclass
class FineTuning:
    """Returns of the policies of one fine-tuning."""

    algorithm: str
    returns: list[float]
    """Mean return after each epoch in which the policy learned."""
    standard_errors: list[float]
    """Of the difference to the clone, episode by episode."""
    share: float = field(default=0.0)
    """Smallest of the returns divided by that of the clone."""


@dataclass
class SeedResult:
    """The clone of one seed and what came of it."""

    seed: int
    accuracy: float
    """Share of validation steps that the saved policy gets right."""
    accuracy_on_unseen_episodes: float | None
    """The same for a policy that was trained with whole episodes kept for validation."""
    rollout_return: float
    """Mean return of the documented rollout: 50 episodes of at most 200 steps, drawn actions."""
    clone_return: float
    """Mean return of whole episodes, most probable actions."""
    fine_tunings: list[FineTuning] = field(default_factory=list)

    def misses(self) -> list[str]:
        """Which goals were not reached."""
        found = []
        if self.accuracy < MIN_ACCURACY:
            found.append(f"seed {self.seed}: accuracy {self.accuracy:.3f} < {MIN_ACCURACY}")
        if self.rollout_return <= 0.0:
            found.append(f"seed {self.seed}: rollout return {self.rollout_return:.1f} <= 0")
        found += [
            f"seed {self.seed}: {tuned.algorithm} fell to {tuned.share:.0%} of the clone's return"
            for tuned in self.fine_tunings
            if tuned.share < MIN_SHARE
        ]
        return found


def maze_run(directory: Path, seed: int, *overrides: str) -> str:
    """One run in a process of its own; what it printed."""
    command = [
        *(sys.executable, "-m", "maze.maze_cli", *overrides, f"hydra.run.dir={directory}"),
        *(f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed}"),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {finished.returncode}:\n{finished.stderr[-3000:]}")
    return finished.stdout


def clone(directory: Path, data: Path, seed: int, *overrides: str) -> str:
    """The documented command. Its evaluation rollouts decide nothing here and are left out to save time."""
    return maze_run(
        directory,
        seed,
        *(
            "-cn",
            "conf_train",
            "verbose=2",
            f"env.name={ENV}",
            *VECTOR_MODEL,
            "algorithm=bc",
            "algorithm.validation_percentage=50",
        ),
        *(f"runner.dataset.dir_or_file={data}", "algorithm.n_eval_episodes=0", *overrides),
    )


def accuracy_of_best(output: str) -> float:
    """Accuracy on the validation data when the saved policy was saved: before the last line about a best model."""
    accuracy = saved = 0.0
    for line in output.splitlines():
        if found := re.search(r"\beval\b.*discrete_accuracy.*\|\s*([\d.]+)\s*$", line):
            accuracy = float(found[1])
        elif "new overall best model" in line:
            saved = accuracy
    return saved


class Player:
    """Plays episodes of fixed seeds with the policies of a run.

    :param directory: The run.
    :param n_episodes: Number of episodes.
    """

    def __init__(self, directory: Path, n_episodes: int) -> None:
        from omegaconf import OmegaConf

        from maze.core.rollout.rollout_runner import RolloutRunner

        config: Any = OmegaConf.load(directory / ".hydra" / "config.yaml")
        agent = {
            "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
            "model": OmegaConf.to_container(config.model, resolve=False),
            "state_dict_file": "state_dict.pt",
            "spaces_dict_file": "spaces_config.pkl",
            "device": "cpu",
        }
        self.n_episodes = n_episodes
        self.envs: list[Any] = []
        for _ in range(min(N_ENVS, n_episodes)):
            env, self.policy = RolloutRunner.init_env_and_agent(config.env, config.wrappers, 0, agent, str(directory))
            self.envs.append(env)

    def load(self, weights: Path) -> None:
        """Take other weights of the same run."""
        from maze.core.utils.checkpoint import load_state

        self.policy.load_state_dict(load_state(weights))  # type: ignore[attr-defined]  # a torch policy

    def returns(self) -> np.ndarray:
        """Undiscounted return of each episode."""
        totals = np.zeros(self.n_episodes)
        waiting = iter(range(self.n_episodes))
        playing = {index: self._start(index, next(waiting)) for index in range(len(self.envs))}
        while playing:
            observations = [observation for _, observation in playing.values()]
            batch = {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
            actions = self.policy.compute_actions(batch, deterministic=True)  # type: ignore[attr-defined]
            for row, (index, (episode, _)) in enumerate(list(playing.items())):
                action = {head: values[row] for head, values in actions.items()}
                observation, reward, done, _ = self.envs[index].step(action)
                totals[episode] += reward
                playing[index] = (episode, observation)
                if done:
                    del playing[index]
                    if (following := next(waiting, None)) is not None:
                        playing[index] = self._start(index, following)
        return totals

    def _start(self, index: int, episode: int) -> tuple[int, Any]:
        self.envs[index].seed(FIRST_EPISODE_SEED + episode)
        return episode, self.envs[index].reset()


def fine_tune(
    algorithm: str, directory: Path, cloned: Path, data: Path, seed: int, overrides: Sequence[str], n_episodes: int
) -> list[np.ndarray]:
    """Return of all policies, that of the clone first, then after each epoch."""
    demonstrations = [f"runner.initial_demonstration_trajectories.input_data={data}"] if algorithm == "sac" else []
    maze_run(
        directory,
        seed,
        *("-cn", "conf_train", f"+experiment=lunar_lander_fine_tune_{algorithm}", f"input_dir={cloned}"),
        # every policy plays afterwards; the evaluations on the way only have to save it
        *("runner.dump_interval=1", "algorithm.rollout_evaluator.n_episodes=1", *demonstrations, *overrides),
    )
    player = Player(directory, n_episodes)
    files = sorted(directory.glob("state_dict-epoch_*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    found = []
    for file in files:
        player.load(file)
        found.append(player.returns())
    return found


def run_seed(seed: int, directory: Path, arguments: argparse.Namespace) -> SeedResult:
    """Everything for one seed."""
    recorded, cloned = directory / "recorded", directory / "cloned"
    data = recorded / "trajectory_data"
    maze_run(recorded, seed, f"env.name={ENV}", "policy=lunar_lander_heuristics", "runner.n_episodes=3")
    accuracy = accuracy_of_best(clone(cloned, data, seed))
    unseen = None
    if arguments.unseen:
        unseen = accuracy_of_best(clone(directory / "unseen", data, seed, "algorithm.validation_split=episodes"))
    rollout = maze_run(
        directory / "rolled_out", seed, f"env.name={ENV}", *VECTOR_MODEL, "policy=torch_policy", f"input_dir={cloned}"
    )
    found = re.search(r"BaseEnvEvents\s+reward\s+mean\s+\|\s*([-\d.]+)", rollout)
    assert found is not None, rollout
    clone_returns = Player(cloned, arguments.episodes).returns()
    result = SeedResult(seed, accuracy, unseen, float(found[1]), float(clone_returns.mean()))
    print(f"  {json.dumps(asdict(result))}", flush=True)
    for algorithm in arguments.algorithms:
        first, *later = fine_tune(
            algorithm, directory / algorithm, cloned, data, seed, arguments.overrides, arguments.episodes
        )
        assert np.array_equal(first, clone_returns), "fine-tuning did not start from the clone"
        tuned = FineTuning(
            algorithm,
            [float(returns.mean()) for returns in later],
            [stdev(returns - clone_returns) / len(returns) ** 0.5 for returns in later],
        )
        tuned.share = min(tuned.returns) / result.clone_return
        result.fine_tunings.append(tuned)
        print(f"  {json.dumps(asdict(tuned))}", flush=True)
    return result


def table(results: Sequence[SeedResult]) -> str:
    """Markdown tables of the clones and of the fine-tunings."""
    lines = [
        "| seed | accuracy | on unseen episodes | rollout return (200 steps) | return of whole episodes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        unseen = result.accuracy_on_unseen_episodes
        lines.append(
            f"| {result.seed} | {result.accuracy:.3f} | {'' if unseen is None else f'{unseen:.3f}'} "
            f"| {result.rollout_return:.1f} | {result.clone_return:.1f} |"
        )
    lines += [
        "",
        "| algorithm | seed | clone | worst epoch | mean of epochs | last epoch | worst / clone |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for tuned in result.fine_tunings:
            worst = int(np.argmin(tuned.returns))
            lines.append(
                f"| {tuned.algorithm} | {result.seed} | {result.clone_return:.1f} "
                f"| {tuned.returns[worst]:.1f} (± {tuned.standard_errors[worst]:.1f}) | {mean(tuned.returns):.1f} "
                f"| {tuned.returns[-1]:.1f} | {tuned.share:.0%} |"
            )
    return "\n".join(lines)


@contextlib.contextmanager
def working_directory(keep: Path | None) -> Iterator[Path]:
    """Where runs are written: a given directory, or one that is removed afterwards."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="imitation_") as name:
            yield Path(name)
    else:
        yield keep.absolute()


def main() -> int:
    """Run the selected parts; exit status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--algorithms", nargs="*", choices=("ppo", "sac"), default=["ppo", "sac"])
    parser.add_argument("--episodes", type=int, default=100, help="episodes for each policy")
    parser.add_argument("--no-unseen", dest="unseen", action="store_false", help="no accuracy on unseen episodes")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the fine-tuning, such as algorithm.n_epochs=3")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    with working_directory(arguments.keep) as directory:
        results = [run_seed(seed, directory / f"seed_{seed}", arguments) for seed in seeds]
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    misses = [miss for result in results for miss in result.misses()]
    for miss in misses:
        print(f"missed: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
