"""gymnasium's vector environments as Maze vector environments: three ways to begin episodes, one course."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import ClipReward

from maze.api.run_context import RunContext
from maze.core.agent.policy import Policy
from maze.core.agent.returns import GAE
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.space_values import zeros
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_events.monitoring_events import DiscreteActionEvents
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.rollout.batched_acting import acting_function
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory
from maze.core.wrappers.gym_vector_env import GymBatch, GymVectorMazeEnv
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main
from maze.train.parallelization.placement import Batched
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.actor_critic.valuation import value_rollout
from maze.train.trainers.common.replay_buffer.rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors
from tests.train.trainers.common.recurrent_models import recurrent_model

GYM = "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env"
MODES = list(AutoresetMode)
RETURN = LogStatsKey(BaseEnvEvents.reward, "sum", None)
ACTIONS = LogStatsKey(DiscreteActionEvents.action, None, ("substep_0", "action"))


class Masked(gymnasium.Env[Any, Any]):
    """Adds the action to a count; an odd count allows one action only, see `info`; ends at 20 or more."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count, self.n_steps = int(self.np_random.integers(10)), 0
        return self._seen()

    def step(self, action: Any) -> Any:
        assert action == 1 or self.count % 2 == 0
        self.count += int(action)
        self.n_steps += 1
        seen, info = self._seen()
        return seen, float(self.count), self.count >= 20, self.n_steps >= 7, info

    def _seen(self) -> Any:
        mask = np.array([self.count % 2 == 0, 1, self.count % 2 == 0], np.int8)
        return np.array([self.count], np.float32), {"action_mask": mask}


class Counters(VectorEnv[Any, Any, Any]):
    """The same without masks, in arrays, in any mode."""

    def __init__(self, num_envs: int, mode: str = "NextStep", name: str = "") -> None:
        self.num_envs, self.mode, self.name = num_envs, AutoresetMode(mode), name
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space, self.single_action_space = Masked.observation_space, Masked.action_space
        self.count = np.zeros(num_envs, np.int64)
        self.n_steps = np.zeros(num_envs, np.int64)
        self.is_over = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._begin(np.ones(self.num_envs, np.bool_) if options is None else options["reset_mask"])
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        waiting = self.is_over if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, np.bool_)
        self.count = self.count + np.where(waiting, 0, actions)
        self.n_steps = self.n_steps + 1
        rewards = np.where(waiting, 0.0, self.count)
        terminated, truncated = (self.count >= 20) & ~waiting, (self.n_steps >= 12) & ~waiting
        self._begin(waiting)
        self.is_over = over = terminated | truncated
        info = {}
        if self.mode is AutoresetMode.SAME_STEP and over.any():
            info = {"final_obs": self._seen(), "_final_obs": over}
            self._begin(over)
        return self._seen(), rewards, terminated, truncated, info

    def _begin(self, where: Any) -> None:
        self.count = np.where(where, self.np_random.integers(10, size=self.num_envs), self.count)
        self.n_steps = np.where(where, 0, self.n_steps)
        self.is_over = self.is_over & ~where

    def _seen(self) -> Any:
        return self.count.astype(np.float32)[:, None]


class KeepsItself(Counters):
    """Has state that the wrapper cannot save, and methods to save it."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.extra = object()

    def state_dict(self) -> dict[str, Any]:
        generator = self.np_random.bit_generator.state
        return {"arrays": [self.count.copy(), self.n_steps.copy(), self.is_over.copy()], "generator": generator}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.n_steps, self.is_over = (array.copy() for array in state["arrays"])
        self.np_random.bit_generator.state = state["generator"]


class Sees(Policy):
    """Acts by what it sees, so that each member takes its own course."""

    def seed(self, seed: int) -> None: ...

    def needs_state(self) -> bool:
        return False

    def compute_actions(self, observation: Any, actor_id: Any, deterministic: bool, out: Any, logits_out: Any) -> None:
        if "action_mask" in observation:
            mask = observation["action_mask"]
            out["action"][:] = np.where(mask[:, 2] == 1, 2, 1)
            assert (np.take_along_axis(mask, out["action"][:, None], 1) == 1).all()
        else:
            out["action"][:] = np.floor(np.abs(observation["observation"][:, 0]) * 1e4) % 3 > 0

    def compute_action(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def compute_top_action_candidates(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module", autouse=True)
def masked_env() -> Any:
    gymnasium.register("Masked-v0", entry_point=Masked)
    yield
    gymnasium.registry.pop("Masked-v0")


def sync(env_id: str, mode: AutoresetMode, n_envs: int = 3) -> BatchedVectorEnv:
    """Members that have generators of their own, so that they take the same course in all modes."""
    limit = {"max_episode_steps": 14} if env_id == "CartPole-v1" else {}
    env = gymnasium.make_vec(env_id, n_envs, "sync", vector_kwargs={"autoreset_mode": mode}, **limit)
    return BatchedVectorEnv(GymBatch(env, "action_mask" if env_id == "Masked-v0" else None))


def decisions(columns: Any) -> list[list[Any]]:
    """What each environment saw, did and got, in the order of time."""
    substep = columns.substeps[0]
    by_env: list[list[Any]] = [[] for _ in range(columns.n_envs)]
    finals = {(entry.tick, entry.env_index): entry.observation for entry in columns.final_observations}
    for row, env in zip(*substep.entries(), strict=True):
        seen = {key: array[row, env].tolist() for key, array in substep.observations.items()}
        flags = columns.rewards[row, env], columns.terminated[row, env], columns.truncated[row, env]
        last = {key: value.tolist() for key, value in finals.get((row, env), {}).items()}
        by_env[env].append((seen, int(substep.actions["action"][row, env]), flags, last))
    return by_env


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Masked-v0"])
def test_all_modes_reproduce_single_environments(env_id):
    limit = {"max_episode_steps": 14} if env_id == "CartPole-v1" else {}
    single = SequentialVectorEnv([EnvFactory({"_target_": GYM, "name": env_id, **limit})] * 3)
    courses = []
    for env in (single, *(sync(env_id, mode) for mode in MODES)):
        env.seed([5, 6, 7])  # gymnasium seeds its members with 5 and what follows
        generator = RolloutGenerator(env)
        generator.collect(Sees(), columns := generator.allocate(60))
        assert columns.step_complete.sum() >= 60 * 3
        courses.append([course[:40] for course in decisions(columns)])
    assert courses[1] == courses[0]
    assert courses[2] == courses[0]
    assert courses[3] == courses[0]
    steps = [step for course in courses[0] for step in course]
    assert any(step[2][1] for step in steps)
    assert any(step[2][2] and step[3] for step in steps)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Masked-v0"])
def test_episodes_have_the_statistics_of_single_environments_in_all_modes(env_id):
    limit = {"max_episode_steps": 14} if env_id == "CartPole-v1" else {}
    single = SequentialVectorEnv([EnvFactory({"_target_": GYM, "name": env_id, **limit})] * 3)
    courses = []
    for env in (single, *(sync(env_id, mode) for mode in MODES)):
        env.seed([5, 6, 7])
        env.episode_budget = np.array([3, 4, 5])
        seen = env.reset()
        actions = zeros(env.action_spaces_dict, (3,), "action")[0]
        by_member: list[list[Any]] = [[] for _ in range(3)]
        while env.episode_budget.any():
            Sees().compute_actions(seen, ActorID(0, 0), True, actions, None)
            seen = env.step(actions)[0]
            for member, stats in env.finished_episodes.items():
                by_member[member].append(stats)
        epoch = env.epoch_stats.reduce()
        epoch[ACTIONS] = sorted(epoch[ACTIONS])  # which of the members' episodes ends first depends on the mode
        courses.append(([course[:3] for course in by_member], epoch))
    (expected, expected_epoch), *others = courses
    assert expected_epoch[LogStatsKey(BaseEnvEvents.reward, "episode_count", None)] == 12
    for episodes, epoch in others:
        assert episodes == expected
        assert epoch == {key: pytest.approx(value) for key, value in expected_epoch.items()}


def test_all_modes_value_the_same_decisions_equally():
    courses = []
    for mode in MODES:
        env = sync("CartPole-v1", mode)
        env.seed([5, 6, 7])
        model = recurrent_model(env, recurrence=False)
        generator = RolloutGenerator(env)
        by_member: list[list[float]] = [[] for _ in range(3)]
        for _ in range(3):
            generator.collect(Sees(), columns := generator.allocate(15))
            # of one step, so that it does not matter where a rollout ends
            (part,) = value_rollout(model, columns, GAE(0.9, 0.0)).parts
            for member, advantage in zip(columns.substeps[0].entries()[1], part.advantages[0].tolist(), strict=True):
                by_member[member].append(advantage)
        courses.append([course[:40] for course in by_member])
    np.testing.assert_allclose(courses[1], courses[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(courses[2], courses[0], rtol=1e-4, atol=1e-5)


def test_hidden_states_are_unaffected_by_pending_autoresets():
    courses = []
    for mode in MODES:
        env = sync("CartPole-v1", mode)
        env.seed([5, 6, 7])
        policy, actor = recurrent_model(env).policy, ActorID(0, 0)
        act = acting_function(policy, env)
        actions = zeros(env.action_spaces_dict, (3,), "action")[0]
        logits = {"action": np.zeros((3, 2), np.float32)}
        by_member: list[list[Any]] = [[] for _ in range(3)]
        seen = env.reset()
        for _ in range(60):
            act(seen, actor, {"action": np.zeros(3, np.int64)}, logits, None)
            for member in set(range(3)) - set([] if env.autoreset_pending is None else env.autoreset_pending.tolist()):
                by_member[member].append(logits["action"][member].tolist())
            Sees().compute_actions(seen, actor, True, actions, None)
            seen = env.step(actions)[0]
        courses.append([course[:40] for course in by_member])
    np.testing.assert_allclose(courses[1], courses[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(courses[2], courses[0], rtol=1e-4, atol=1e-5)


def test_members_that_start_in_the_next_step_are_left_out_of_statistics_and_columns():
    raw = gymnasium.make_vec("CartPole-v1", 4, "vector_entry_point")
    env = Batched().vector_env(EnvFactory("CartPole-v1"), 4)
    env.seed([9, 1, 2, 3])
    out = zeros(env.observation_spaces_dict, (4,), "observation")
    env.reset(out)
    np.testing.assert_array_equal(raw.reset(seed=9)[0], out[0]["observation"])
    rng = np.random.default_rng(0)
    returns, lengths, n_pauses = np.zeros(4), np.zeros(4, int), 0
    was_over = np.zeros(4, bool)
    for _ in range(150):
        actions = rng.integers(0, 2, 4)
        seen, rewards, terminated, truncated, _ = raw.step(actions)
        env.step({"action": actions}, out)
        over = terminated | truncated
        np.testing.assert_array_equal(env.step_complete, ~was_over)
        np.testing.assert_array_equal(env.terminated | env.truncated, over)
        np.testing.assert_array_equal(out[0]["observation"][~over], seen[~over])
        np.testing.assert_array_equal(env.rewards, rewards)
        returns += rewards
        lengths += ~was_over
        np.testing.assert_array_equal(env.get_env_time(), np.where(over, 0, lengths))
        assert {row: stats[RETURN] for row, stats in env.finished_episodes.items()} == {
            int(row): returns[row] for row in np.flatnonzero(over)
        }
        assert all(len(stats[ACTIONS]) == lengths[row] for row, stats in env.finished_episodes.items())
        n_pauses += was_over.sum()
        returns[over] = lengths[over] = 0
        was_over = over
    assert n_pauses > 10


def test_the_statistics_of_an_epoch_are_those_of_its_episodes_one_after_the_other():
    n_envs = 32
    env = Batched().vector_env(EnvFactory("CartPole-v1"), n_envs)
    env.seed(list(range(n_envs)))
    out = zeros(env.observation_spaces_dict, (n_envs,), "observation")
    env.reset(out)
    rng = np.random.default_rng(1)
    returns, taken, running = [], [], [list[int]() for _ in range(n_envs)]
    for _ in range(1300):  # more than are kept before room is made, and than are reduced together
        actions = rng.integers(0, 2, n_envs)
        env.step({"action": actions}, out)
        for row in range(n_envs):
            if env.step_complete[row]:
                running[row].append(int(actions[row]))
            if env.terminated[row]:
                returns.append(float(len(running[row])))
                taken += running[row]
                running[row] = []
    stats = env.epoch_stats.reduce()
    assert len(returns) > 1000
    assert stats[ACTIONS] == taken  # in the order in which the episodes ended
    assert all(type(action) is int for action in stats[ACTIONS])
    assert stats[LogStatsKey(BaseEnvEvents.reward, "mean", None)] == np.mean(returns)
    assert stats[LogStatsKey(BaseEnvEvents.reward, "std", None)] == np.std(returns)
    assert stats[LogStatsKey(BaseEnvEvents.reward, "total_step_count", None)] == len(taken)
    assert stats[LogStatsKey(BaseEnvEvents.reward, "episode_count", None)] == len(returns)


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_buffer_gets_each_decision_once(mode):
    rows = []
    for each in (AutoresetMode.DISABLED, mode):
        env = sync("Masked-v0", each)
        env.seed([5, 6, 7])
        generator = RolloutGenerator(env)
        spaces_of = (env.observation_spaces_dict, env.action_spaces_dict)
        converter = RolloutRows(fixed_actors(env.agent_counts_dict), *spaces_of, 3)
        by_member: list[list[Any]] = [[] for _ in range(3)]
        number, last = 0, [-1] * 3
        for _ in range(5):
            generator.collect(Sees(), columns := generator.allocate(7))
            got = converter.convert(columns, number)
            owner = np.repeat(np.arange(3), 7) if columns.is_dense() else np.sort(columns.substeps[0].entries()[1])
            for index, member in enumerate(owner):
                assert got.follows[index] in (-1, last[member])
                begins = got.follows[index] == -1
                following = None if got.terminated[index] else got.next_observation["observation"][index].tolist()
                by_member[member].append(
                    (begins, got.observations[0]["observation"][index].tolist(), got.rewards[index].tolist(), following)
                )
                last[member] = number + index
            number += len(got)
        rows.append([course[:25] for course in by_member])
    assert rows[0] == rows[1]


def drawn(env: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"action": rng.integers(0, env.action_spaces_dict[0]["action"].n, env.n_envs)}


def seen_in(env: Any, n_ticks: int, rng: np.random.Generator) -> list[Any]:
    course = []
    for _ in range(n_ticks):
        observation, rewards, dones, _ = env.step(drawn(env, rng))
        finals = {row: final.observation["observation"].tolist() for row, final in env.final_observations.items()}
        pauses = None if env.autoreset_pending is None else env.autoreset_pending.tolist()
        episodes = dict(env.finished_episodes)
        course.append((observation["observation"].tolist(), rewards.tolist(), dones.tolist(), finals, pauses, episodes))
    return course


@pytest.mark.parametrize(
    "make", [*(lambda n, mode=mode: Counters(n, mode.value) for mode in MODES), KeepsItself, gymnasium.make_vec]
)
@pytest.mark.parametrize("n_ticks", [0, 20, 33])
def test_a_state_is_continued_exactly(make, n_ticks):
    def fresh(seeds: list[int]) -> BatchedVectorEnv:
        simulation = GymBatch(make("CartPole-v1", 3) if make is gymnasium.make_vec else make(3))
        env = BatchedVectorEnv(simulation)
        env.seed(seeds)
        env.reset()
        return env

    original, other = fresh([1, 2, 3]), fresh([7, 8, 9])
    seen_in(original, n_ticks, np.random.default_rng(0))
    state = original.state_dict()
    seen_in(other, 5, np.random.default_rng(4))
    assert other.load_state_dict(state) == {}
    other.reset()
    assert seen_in(other, 60, np.random.default_rng(5)) == seen_in(original, 60, np.random.default_rng(5))


def test_environments_that_cannot_be_saved_start_new_episodes_with_a_reason():
    envs = [BatchedVectorEnv(GymBatch(Counters(2))) for _ in range(3)]
    for env in envs:
        env.seed([1, 2])
        env.reset()
    opaque, sharing, other = envs
    opaque.simulation.env.physics = object()  # type: ignore[attr-defined]
    sharing.simulation.env.view = sharing.simulation.env.count[:1]  # type: ignore[attr-defined]
    for env, reason in (
        (opaque, "attribute `physics` of Counters is a object that cannot be stored"),
        (sharing, "share their content"),
    ):
        problems = other.load_state_dict(env.state_dict())
        assert list(problems) == [0, 1]
        assert reason in problems[1]
        other.reset()
        env.reset()  # both continue with the next derived seed
        assert seen_in(other, 9, np.random.default_rng(5)) == seen_in(env, 9, np.random.default_rng(5))


def test_single_environments_are_made_of_a_vector_environment():
    env = EnvFactory(Counters)()
    assert isinstance(env, GymVectorMazeEnv)
    assert isinstance(env, BatchedMazeEnv)
    for seed in (3, 3):
        env.seed(seed)
        first = env.reset()
        np.testing.assert_array_equal(first["observation"], [Counters(1).reset(seed=3)[0][0, 0]])
        done, n_steps = False, 0
        while not done:
            observation, reward, done, info = env.step({"action": 1})
            n_steps += 1
            assert reward == observation["observation"][0] == first["observation"][0] + n_steps
        assert (n_steps == 12) == bool(info.get("TimeLimit.truncated")) or observation["observation"][0] >= 20
    clone = EnvFactory(Counters)()
    env.reset()
    clone.reset()
    clone.clone_from(env)
    assert clone.step({"action": 2})[0] == env.step({"action": 2})[0]


SMALL = {
    "algorithm.epoch_length": 1,
    "algorithm.n_rollout_steps": 16,
    "algorithm.batch_size": 64,
    "algorithm.rollout_evaluator.n_episodes": 2,
    "seeding.env_base_seed": 5,
    "seeding.agent_base_seed": 6,
}


@pytest.mark.parametrize(
    ("env", "n_envs"),
    [
        (lambda: gymnasium.make_vec("CartPole-v1", num_envs=6), 6),
        (lambda: Counters, 8),
        (lambda: lambda num_envs: Counters(num_envs, "SameStep"), 8),
        (lambda: lambda: gymnasium.make_vec("CartPole-v1", num_envs=5), 5),
        (lambda: {"_target_": f"{__name__}.Counters", "mode": "Disabled"}, 8),
        (lambda: {"_target_": "gymnasium.make_vec", "id": "CartPole-v1"}, 8),
    ],
)
def test_vector_environments_and_what_makes_them_are_trained_with(env, n_envs, tmp_path):
    with RunContext(env=env(), algorithm="ppo", run_dir=str(tmp_path), silent=True, overrides=SMALL) as rc:
        result = rc.train(n_epochs=1)
        assert isinstance(rc.runner.placement, Batched)
        assert rc.runner.trainer.rollout_generator.env.n_envs == n_envs
        assert np.isfinite(result.best_score)
        assert rc.evaluate(n_episodes=1).mean_reward > 0


@pytest.mark.parametrize("algorithm", ["dqn", "a2c"])
def test_other_algorithms_are_trained_at_once(algorithm, tmp_path):
    more = {"algorithm.num_actors": 3, "algorithm.rollouts_per_iteration": 3, "algorithm.initial_buffer_size": 50}
    overrides = {
        "runner.placement": "batched",
        "algorithm.rollout_evaluator.n_episodes": 1,
        "algorithm.epoch_length": 2,
        **(more if algorithm == "dqn" else {"runner.concurrency": 3}),
    }
    with RunContext(
        env="CartPole-v1", algorithm=algorithm, run_dir=str(tmp_path), silent=True, overrides=overrides
    ) as rc:
        assert rc.train(n_epochs=1).best_score > 0


@pytest.mark.parametrize("mode", MODES)
def test_recurrent_models_are_trained_in_every_mode(mode, tmp_path):
    overrides = {**SMALL, "runner.concurrency": 3, "model.recurrence": "carried", "algorithm.n_rollout_steps": 40}
    with RunContext(
        env=lambda num_envs: Counters(num_envs, mode.value),
        algorithm="ppo",
        model="auto",
        run_dir=str(tmp_path),
        silent=True,
        overrides=overrides,
    ) as rc:
        assert np.isfinite(rc.train(n_epochs=1).best_score)


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, capsys):
    arguments = ["-cn", "conf_train", "env.name=CartPole-v1", "algorithm=ppo", "runner.placement=batched"]
    arguments += [
        "runner.concurrency=6",
        "runner.eval_concurrency=2",
        *(f"{key}={value}" for key, value in SMALL.items()),
    ]
    rows = []
    for name, numbers in (("whole", [2]), ("halves", [1, 2])):
        for index, n_epochs in enumerate(numbers):
            directory = tmp_path / name / str(index)
            more = [f"algorithm.n_epochs={n_epochs}", f"hydra.run.dir={directory}"]
            more += [f"input_dir={directory.with_name(str(index - 1))}", "resume=true"] if index else []
            assert main([*arguments, *more]) in (0, None), capsys.readouterr()
        rows.append((directory / "progress.csv").read_text().splitlines())
    header = rows[0][0].split(",")
    last = [dict(zip(header, lines[-1].split(","), strict=False)) for lines in rows]
    compared = [key for key in header if "time" not in key and key != "seconds"]
    assert {key: last[0][key] for key in compared} == {key: last[1][key] for key in compared}


class Untold(Counters):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.metadata = {}


class Forgetful(Counters):
    def step(self, actions: Any) -> Any:
        return (*super().step(actions)[:4], {})


class Misshapen(Counters):
    def step(self, actions: Any) -> Any:
        seen, rewards, *flags = super().step(actions)
        return seen, rewards[:1], *flags


def test_contract_violations_of_a_vector_environment_are_named():
    with pytest.raises(
        ConfigError, match=r"expected metadata\['autoreset_mode'\] to be one of .*NEXT_STEP.*found None"
    ):
        GymBatch(Untold(2))
    for simulation, message in (
        (GymBatch(Forgetful(2, "SameStep")), r"members \[\d.*expected in info\['final_obs'\]"),
        (GymBatch(Misshapen(2)), r"of the shape \(2,\), one for each member, found \(1,\)"),
    ):
        env = BatchedVectorEnv(simulation)
        env.seed([1, 2])
        env.reset()
        with pytest.raises(EnvironmentContractError, match=message):
            seen_in(env, 40, np.random.default_rng(0))
    with pytest.raises(EnvironmentContractError, match=r"mask of valid actions `action_mask` is missing .*\[0, 1\]"):
        BatchedVectorEnv(GymBatch(Counters(2), "action_mask")).reset()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            lambda: ClipReward(gymnasium.make_vec("CartPole-v1", 2), 0, 1),
            "wrapped or was not made .* Expected a class",
        ),
        (lambda: Counters(2), "was not made by `gymnasium.make_vec`"),
        (lambda: lambda num_envs: Counters(2), "expected a vector environment with 1 members"),
    ],
)
def test_vector_environments_that_cannot_be_made_again_are_refused(env, message):
    with pytest.raises(ConfigError, match=message):
        EnvFactory(env())()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "MountainCar-v0"}, "registered in gymnasium with a `vector_entry_point`"),
        (
            {"name": "CartPole-v1", "gym_wrappers": ["ClipReward"]},
            "ClipReward of `CartPole-v1` wrap single environments",
        ),
    ],
)
def test_single_environments_without_a_vector_environment_are_named(config, message):
    if "gym_wrappers" in config:
        config = {**config, "gym_wrappers": [{"ClipReward": {"min_reward": 0, "max_reward": 1}}]}
    with pytest.raises(ConfigError, match=message):
        Batched().vector_env(EnvFactory({"_target_": GYM, **config}), 2)


def test_a_single_environment_has_the_spaces_of_its_vector_environment():
    class Wider(GymMazeEnv):
        def batch(self, n_envs: int) -> Any:
            return GymBatch(Counters(n_envs))

    with pytest.raises(EnvironmentContractError, match=r"runner\.placement=batched: .* same `observation_spaces_dict`"):
        Batched().vector_env(lambda: Wider("CartPole-v1"), 2)
