"""Instance sets and batches: given instances once and in order, and the best of many plays as one by one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.context import InstanceSet, ordered_seeds
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.parallel_rollout_runner import ParallelRolloutRunner
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.rollout.solve import Search, solve
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.evaluation.runners import ComparisonRunner
from maze.maze_cli import main
from maze.serve.bundle import PolicyBundle
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.utils.check_env import check_env
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSalesEnv
from maze_envs.scheduling.job_shop import JobShopEnv
from maze_envs.scheduling.rules import DispatchingRule

VALUES = np.array([[3, 1, 2], [9, 8, 7], [4, 6, 5], [2, 2, 8]])
LENGTHS = np.array([2, 3, 1, 3])


class Picks(BatchedCoreEnv):
    """Each step one of three remaining numbers is picked, and divided by the number of the step."""

    row_arrays = ("values", "left", "length", "elapsed")
    instance_arrays = ("values", "lengths")

    def __init__(self, n_envs: int, instances: Any = None) -> None:
        seen = spaces.Dict(values=spaces.Box(0, 9, (3,), np.float32), pick_mask=spaces.Box(0, 1, (3,), np.float32))
        super().__init__(n_envs, {0: spaces.Dict(pick=spaces.Discrete(3))}, {0: seen})
        self.values, self.left = np.zeros((n_envs, 3)), np.ones((n_envs, 3), np.bool_)
        self.length = np.ones(n_envs, np.int64)
        self.use_instances(instances)

    def reset_rows(self, rows: np.ndarray) -> None:
        self.load_instances(
            rows, {"values": np.floor(10 * self.random.uniform(rows, 3)), "lengths": np.full(len(rows), 3)}
        )

    def load_instances(self, rows: np.ndarray, instances: Any) -> None:
        self.values[rows], self.length[rows], self.left[rows] = instances["values"], instances["lengths"], True

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(self.n_envs)
        pick = np.where(self.left[rows, actions["pick"]], actions["pick"], self.left.argmax(axis=1))
        reward = self.values[rows, pick] / (1 + self.elapsed)
        self.left[rows, pick] = False
        return reward, self.elapsed + 1 >= self.length

    def observe(self, out: Any) -> None:
        out["values"][:] = self.values
        out["pick_mask"][:] = self.left | ~self.left.any(axis=1, keepdims=True)

    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"first": self.values[rows, 0]}


class PicksEnv(BatchedMazeEnv):
    def __init__(self, instances: Any = None) -> None:
        super().__init__(functools.partial(Picks, instances=instances))


class Smallest(ArrayPolicy):
    """Picks the smallest number first."""

    def choose(self, observation: Any, step_key: Any) -> dict[str, np.ndarray]:
        return {"pick": np.where(observation["pick_mask"] > 0, observation["values"], np.inf).argmin(axis=1)}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file() -> str:
    np.savez("picks.npz", values=VALUES, lengths=LENGTHS)
    return "picks.npz"


def smallest_first(number: int) -> float:
    values = sorted(VALUES[number])[: LENGTHS[number]]
    return float(sum(value / (1 + step) for step, value in enumerate(values)))


EXPECTED = [smallest_first(number) for number in range(4)]


def test_an_environment_plays_each_instance_once_and_in_order(file: str) -> None:
    assert check_env(lambda: PicksEnv(file), n_steps=60).findings == []
    env = PicksEnv(file)
    assert [env.reset()["values"].tolist() for _ in range(5)] == VALUES[[0, 1, 2, 3, 0]].tolist()
    env.seed(6)
    assert [env.reset()["values"].tolist() for _ in range(2)] == VALUES[[2, 3]].tolist()
    copied = PicksEnv(file)
    copied.reset()
    copied.clone_from(env)
    assert copied.reset()["values"].tolist() == VALUES[0].tolist()
    assert [seed % 4 for seed, _ in ordered_seeds([(2**31 - 1, 1), (5, 1), (1, 1), (0, 1)], 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("processes", [0, 2])
def test_rollouts_play_the_instances_in_order(processes: int, capfd: pytest.CaptureFixture[str]) -> None:
    def stats(n_episodes: int) -> float:
        common = {
            "n_episodes": n_episodes,
            "max_episode_steps": 0,
            "record_trajectory": False,
            "record_event_logs": False,
        }
        runner: Any = (
            ParallelRolloutRunner(n_processes=processes, **common)
            if processes
            else SequentialRolloutRunner(render=False, **common)
        )
        runner.maze_seeding = MazeSeeding(7, 8, False)
        runner.run_with(PicksEnv({"values": VALUES, "lengths": LENGTHS}), {}, Smallest())
        return float(
            next(value for key, value in runner.stats.items() if (key.output_name, key.group) == ("mean", None))
        )

    assert stats(4) == stats(8) == pytest.approx(np.mean(EXPECTED))
    assert stats(3) == pytest.approx(np.mean(EXPECTED[:3]))
    assert "The first 3 of 4 instances" in capfd.readouterr().out
    with pytest.raises(ConfigError, match=r"n_episodes=5: env.instances has 4 instances"):
        stats(5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchedVectorEnv(PicksEnv({"values": VALUES, "lengths": LENGTHS}).batch(3)),
        lambda: SequentialVectorEnv([lambda: PicksEnv({"values": VALUES, "lengths": LENGTHS})] * 3),
        lambda: SubprocVectorEnv([lambda: PicksEnv({"values": VALUES, "lengths": LENGTHS})] * 3, start_method="fork"),
        lambda: LogStatsWrapper.wrap(PicksEnv({"values": VALUES, "lengths": LENGTHS})),
    ],
    ids=["batched", "sequential", "processes", "single"],
)
def test_every_evaluation_plays_the_instances_once(make: Any) -> None:
    env = make()
    env.seed([5, 6, 7] if hasattr(env, "n_envs") else 5)
    evaluator = RolloutEvaluator(env, 4, None, deterministic=True)
    for _ in range(2):
        evaluator.evaluate(Smallest())
        stats = env.get_stats(LogStatsLevel.EPOCH).last_stats
        found = {key.output_name: value for key, value in stats.items() if key.event.__name__ == "reward"}
        assert found["mean"] == pytest.approx(np.mean(EXPECTED), rel=1e-6)
        assert (found["min"], found["max"]) == pytest.approx((min(EXPECTED), max(EXPECTED)), rel=1e-6)
    env.close()


def test_comparisons_play_the_instances_in_order() -> None:
    env = {"_target_": "maze_envs.scheduling.job_shop.JobShopEnv", "instances": ["ta01", "ta02"], "only_choices": True}
    rules = {rule: {"_target_": "maze_envs.scheduling.rules.DispatchingRule", "rule": rule} for rule in ("MWKR", "SPT")}
    runner = ComparisonRunner(policies=rules, n_episodes=2)
    runner.setup(OmegaConf.create({"env": env, "seeding": {"env_base_seed": 1, "agent_base_seed": 2}}))
    runner.run()
    assert runner.comparison is not None
    for played in runner.comparison.played:
        expected = [each.kpis["makespan"] for each in solve(DispatchingRule(played.name), JobShopEnv, ["ta01", "ta02"])]
        assert played.measures["makespan"][0].tolist() == expected


@pytest.mark.long
def test_a_run_is_evaluated_and_played_on_a_file_of_instances(capfd: pytest.CaptureFixture[str]) -> None:
    shops = {"durations": np.full((3, 2, 2), 5), "machines": np.tile(np.arange(2), (3, 2, 1))}
    np.savez("shops.npz", **shops)
    few = ["algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=5", "algorithm.batch_size=5"]
    common = ["-cn", "conf_train", "env=job_shop", "env.n_jobs=2", "env.n_machines=2", "env.only_choices=false"]
    common += [
        "model=auto",
        "algorithm=ppo",
        *few,
        "runner=dev",
        "runner.concurrency=1",
        "algorithm.rollout_evaluator.n_episodes=3",
    ]
    assert main([*common, "+algorithm.rollout_evaluator.instances=shops.npz", "hydra.run.dir=run"]) == 0
    found = solve("run", {"_target_": "maze_envs.scheduling.job_shop.JobShopEnv"}, "shops.npz")
    assert [each.kpis["makespan"] for each in found] == [15.0] * 3
    PolicyBundle.from_run("run").save("policy.maze")
    served = solve("policy.maze", JobShopEnv, "shops.npz")
    assert [each.actions for each in served] == [each.actions for each in found]
    capfd.readouterr()
    rollout = [
        "env.instances=shops.npz",
        "policy=torch_policy",
        "input_dir=run",
        "runner=sequential",
        "runner.best_of=4",
    ]
    assert main(["env=job_shop", *rollout, "runner.n_episodes=3", "hydra.run.dir=rollout"]) == 0
    assert "makespan" in capfd.readouterr().out


def test_solutions_are_those_of_single_environments(file: str) -> None:
    found = solve(Smallest(), PicksEnv, file)
    assert [each.total_reward for each in found] == pytest.approx(EXPECTED)
    assert [each.kpis["first"] for each in found] == VALUES[:, 0].tolist()
    assert [len(each.actions) for each in found] == LENGTHS.tolist()
    env = PicksEnv(file)
    sampled = solve(RandomPolicy(env.action_spaces_dict), env, n_samples=40, seed=3)
    for number, each in enumerate(sampled):
        env.reset()
        assert sum(env.step(action)[1] for action in each.actions) == pytest.approx(each.total_reward)
        best = sorted(VALUES[number], reverse=True)[: LENGTHS[number]]
        assert each.total_reward == pytest.approx(sum(value / (1 + step) for step, value in enumerate(best)))
        assert each.total_reward == max(each.all_returns)


def test_many_plays_are_stepped_in_parts(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_rows: list[int] = []
    advance = Picks.advance
    monkeypatch.setattr(Picks, "advance", lambda self, actions: n_rows.append(self.n_envs) or advance(self, actions))
    found = solve(RandomPolicy(PicksEnv().action_spaces_dict), PicksEnv, file, n_samples=2050)
    assert max(n_rows) == 1024
    for number, each in enumerate(found):
        best = sorted(VALUES[number], reverse=True)[: LENGTHS[number]]
        assert each.total_reward == pytest.approx(sum(value / (1 + step) for step, value in enumerate(best)))
        assert len(each.all_returns) == 2050


def test_every_first_action_is_continued_greedily(file: str) -> None:
    found = solve(Smallest(), PicksEnv, file, starts="first_action")
    for number, values in enumerate(VALUES.tolist()):
        tried = []
        for first in values:
            rest = sorted(values)
            rest.remove(first)
            tried.append(sum(value / (1 + step) for step, value in enumerate([first, *rest][: LENGTHS[number]])))
        assert sorted(found[number].all_returns) == pytest.approx(sorted(tried))
        assert found[number].total_reward == pytest.approx(max(tried))


def test_a_batch_finds_what_single_plays_find() -> None:
    env = PicksEnv()
    policy, seeds = RandomPolicy(env.action_spaces_dict), [(3, 1), (4, 2)]
    found = []
    for each in (env, RewardScalingWrapper.wrap(PicksEnv(), scale=1.0)):  # in batches, and one after the other
        plays, of_plays = RolloutRunner.best_plays(each, policy, seeds, Search(best_of=60))
        returns: list[float] = []
        RolloutRunner.run_interaction_loop(each, plays, 2, episode_seeds=of_plays, returns=returns)
        found.append(returns)
    assert found[0] == found[1]  # so many samples find the optimum
    plays, of_plays = RolloutRunner.best_plays(env, Smallest(), seeds, Search(starts="first_action"))
    RolloutRunner.run_interaction_loop(env, plays, 2, episode_seeds=of_plays)
    with pytest.raises(ConfigError, match=r"runner\.starts: expected an environment with a vectorised simulation"):
        RolloutRunner.best_plays(each, Smallest(), seeds, Search(starts="first_action"))


def test_hindsight_and_invalid_arguments_are_refused(file: str) -> None:
    env = PicksEnv(file)
    with pytest.raises(ConfigError, match="there are no instances"):
        solve(Smallest(), PicksEnv())
    with pytest.raises(ConfigError, match="found it with 3 sampled plays"):
        solve(Smallest(), env, n_samples=3, starts="first_action")
    for other in ("CartPole-v1", GymMazeEnv("CartPole-v1")):
        with pytest.raises(ConfigError, match="expected an environment with a vectorised simulation"):
            solve(Smallest(), other)
    with pytest.raises(ConfigError, match="n_samples: expected a whole number of at least 1, found 0"):
        solve(Smallest(), env, n_samples=0)
    with pytest.raises(ConfigError, match="unknown argument `instances`"):
        solve(Smallest(), lambda: PicksEnv(file), file)
    with pytest.raises(ConfigError, match=r"LostSales has no instance sets; it needs load_instances"):
        solve(BaseStockPolicy(5), LostSalesEnv(), {"demand": np.zeros((2, 3))})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"values": VALUES}, r"picks.npz: Picks needs the arrays values, lengths; found values"),
        (
            {"values": VALUES, "lengths": LENGTHS[:2]},
            r"same number of instances, .* `values` \(4, 3\), `lengths` \(2,\)",
        ),
        ({"values": VALUES[:0], "lengths": LENGTHS[:0]}, "at least one"),
        ({"values": VALUES[:, :2], "lengths": LENGTHS}, "the arrays do not fit Picks.load_instances"),
        ({"values": np.array([object()]), "lengths": LENGTHS[:1]}, "expected an .npz file of arrays"),
        (None, "env.instances=picks.npz: expected an .npz file"),
    ],
)
def test_wrong_files_are_named(arrays: Any, message: str) -> None:
    if arrays is not None:
        np.savez("picks.npz", **arrays)
    with pytest.raises(ConfigError, match=message):
        PicksEnv("picks.npz")
    with pytest.raises(ConfigError, match="no arrays"):
        InstanceSet({})
