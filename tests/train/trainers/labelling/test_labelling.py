"""Trainers that label decisions by simulation: deep controlled learning and self-labelling."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.api.run_context import RunContext
from maze.core.agent.policy import Policy
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.planning.planner import Planner
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator
from maze.train.trainers.imitation.bc_loss import BCLoss
from maze.train.trainers.labelling.labelling_algorithms import (
    DCL,
    SelfLabelling,
    best_of_each,
    conditional_gumbel,
    label_weight,
)
from maze.train.trainers.labelling.labelling_configs import DCLConfig, SelfLabellingConfig
from maze.train.trainers.labelling.labelling_trainer import LabelledDecisions
from maze_envs.scheduling.job_shop import JobShopEnv


class Lamps(BatchedCoreEnv):
    """Five steps of two sub-steps: a colour of two, then one of three doors, of which a mask closes one.

    The reward is 1 for the lit door, if the colour is the right one; with chance, it is paid in three of four cases
    only. The closed door of a step is the one after the lit door.
    """

    row_arrays = ("lit", "colour", "chosen", "elapsed")

    def __init__(self, n_envs: int, chance: float = 0.0) -> None:
        seen = {
            "lit": spaces.Box(0, 1, (3,), np.float32),
            "right": spaces.Box(0, 1, (1,), np.float32),
        }
        super().__init__(
            n_envs,
            {"colour": spaces.Dict(colour=spaces.Discrete(2)), "door": spaces.Dict(door=spaces.Discrete(3))},
            {
                "colour": spaces.Dict(seen),
                "door": spaces.Dict({**seen, "door_mask": spaces.Box(0, 1, (3,), np.float32)}),
            },
            max_episode_steps=5,
        )
        self.chance = chance
        self.lit, self.colour, self.chosen = (np.zeros(n_envs, np.int64) for _ in range(3))

    def reset_rows(self, rows: np.ndarray) -> None:
        drawn = self.random.uniform(rows, count=2)
        self.lit[rows], self.colour[rows] = (3 * drawn[:, 0]).astype(np.int64), (2 * drawn[:, 1]).astype(np.int64)

    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        nothing = np.zeros(self.n_envs)
        if self.substep == 0:
            self.chosen[:] = actions["colour"]
            return nothing, self.no_rows
        assert (actions["door"] != (self.lit + 1) % 3).all(), "a closed door"
        reward = ((actions["door"] == self.lit) & (self.chosen == self.colour)).astype(np.float64)
        if self.chance:
            reward *= self.random.uniform() >= self.chance
        self.lit[:] = (self.lit + 1) % 3
        return reward, self.no_rows.copy()

    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        out["lit"][...] = self.lit[:, None] == np.arange(3)
        out["right"][:, 0] = self.colour
        if self.substep == 1:
            out["door_mask"][...] = (self.lit[:, None] + 1) % 3 != np.arange(3)


class LampsEnv(BatchedMazeEnv):
    """A single one."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__(functools.partial(Lamps, chance=chance))


class FirstColour(Policy):
    """A heuristic: the lit door, always with the first colour."""

    def compute_action(
        self,
        observation: Any,
        maze_state: Any,
        env: Any,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        if actor_id is not None and actor_id.step_key == "colour":
            return {"colour": 0}
        return {"door": int(np.argmax(observation["lit"]))}


def run_of(algorithm: Any, env: Any, **overrides: Any) -> RunContext:
    """A run with fixed seeds and few evaluations."""
    settings = {"seeding.agent_base_seed": 3, "seeding.env_base_seed": 5, "runner.concurrency": 2}
    return RunContext(
        env=env, algorithm=algorithm, model="flatten_concat", silent=True, overrides={**settings, **overrides}
    )


def single_lamps(chance: float = 0.0) -> Any:
    """Not in arrays: there is a wrapper that changes rewards."""
    return RewardScalingWrapper.wrap(LampsEnv(chance), scale=1.0)


def test_the_weight_of_a_label_is_its_advantage_over_the_mean_of_the_others() -> None:
    assert label_weight(np.array([0.0, 2.0, -1.0]), best=1) == pytest.approx(2.5)  # 2 - (0 - 1) / 2
    assert label_weight(np.array([0.0, -2.0, -1.0]), best=0) == pytest.approx(1.5)
    assert label_weight(np.array([0.0, 0.0, 0.0]), best=0) == 0.0
    assert label_weight(np.array([0.0, 1.0, 5.0]), best=1) == 0.0, "others, dropped early, look better"


def test_candidates_that_were_dropped_early_are_no_labels() -> None:
    # Two candidates meet 8, 8 and 16 scenarios. In the first 8 they gain 3 and 4: the former is dropped. The latter
    # gains 0 in all others: 1 on average, which is less than 3, but more than the base's action.
    class Scenarios:
        n_decisions = 0

        def __call__(self, source: Any, rows: Any, scenarios: Any, first: Any, seed: Any) -> Any:
            which = np.array([action["index"] for action in first.actions])[first.which]
            noise = np.where(scenarios % 2, 1.0, -1.0) * which
            return np.where(scenarios < 8, np.array([0.0, 3.0, 4.0])[which], 0.0) + noise

    (found,) = Planner(Scenarios(), scenarios=32).plan(None, [[{"index": index} for index in range(3)]], seed=0)
    assert found.scenarios.tolist() == [32, 8, 32]
    assert found.differences.tolist() == pytest.approx([0.0, 3.0, 1.0])
    assert found.best == 2


def test_weighted_losses_are_those_of_repeated_rows() -> None:
    class Given:
        device = "cpu"

        def compute_substep_policy_output(self, observation: Any, actor: Any) -> Any:
            output = type("Output", (), {})()
            output.action_logits, output.entropy = {"a": observation["logits"]}, torch.zeros(1)
            return output

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    loss = BCLoss({0: spaces.Dict(a=spaces.Discrete(3))}, 0.0)
    logits, action = torch.randn(2, 3), torch.tensor([0, 2])
    actor: Any = [ActorID(0, 0)]
    of: Any = functools.partial(loss.calculate_loss, Given())  # type: ignore[arg-type]  # what is needed of a policy
    weighted = of([{"logits": logits}], [{"a": action}], actor, Silent(), weights=[torch.tensor([0.5, 1.5])])
    repeated = torch.tensor([0, 1, 1, 1])
    plain = of([{"logits": logits[repeated]}], [{"a": action[repeated]}], actor, Silent())
    assert float(weighted) == pytest.approx(float(plain), rel=1e-6)
    # a decision counts by its weight alone, however many are those of its agent
    weights = torch.tensor([0.5, 1.0, 1.5, 1.0])
    joint = of([{"logits": logits[repeated]}], [{"a": action[repeated]}], actor, Silent(), weights=[weights])
    parts = [repeated[:1], repeated[1:]]
    seen, taken = ([{name: of_all[part]} for part in parts] for name, of_all in (("logits", logits), ("a", action)))
    agents = [ActorID(0, agent) for agent in range(2)]
    divided = of(seen, taken, agents, Silent(), weights=[weights[:1], weights[1:]])
    assert float(divided) == pytest.approx(float(joint), rel=1e-6)


def test_minibatches_have_each_decision_once_with_weights_of_mean_one() -> None:
    labelled = LabelledDecisions(1)
    for key, n, n_before in (("x", 5, 0), ("y", 3, 5), ("x", 2, 8)):
        seen = {"o": np.arange(n, dtype=np.float32)[:, None] + 10 * n_before}
        labelled.add(ActorID(key, 0), seen, [{"a": int(value)} for value in seen["o"][:, 0]], np.full(n, 2.0))
    restored = LabelledDecisions(2)
    restored.load_state_dict(labelled.state_dict())
    batches = list(restored.minibatches(4))
    assert [sum(map(len, batch.weights)) for batch in batches] == [4, 4, 2]
    pairs = [
        (float(o), int(a), float(w))
        for batch in batches
        for seen, actions, weights in zip(batch.observations, batch.actions, batch.weights, strict=True)
        for o, a, w in zip(seen["o"][:, 0], actions["a"], weights, strict=True)
    ]
    assert sorted(a for _, a, _ in pairs) == [0, 1, 2, 3, 4, 50, 51, 52, 80, 81]
    assert all(o == a and w == 1.0 for o, a, w in pairs)


def test_the_best_of_each_group_come_first() -> None:
    found = best_of_each(np.array([1.0, 5.0, 3.0, 0.0, 2.0]), np.array([0, 0, 0, 1, 1]), 2, 3)
    assert found.tolist() == [1, 2, 0, 4, 3, -1]


def test_perturbed_leaves_are_a_sample_without_replacement() -> None:
    """Of a tree with two levels: the first of two leaves has the frequency of its probability, the second that of what
    is left."""
    rng = np.random.default_rng(0)
    upper, lower = np.log([0.7, 0.3]), np.log([[0.5, 0.5], [0.9, 0.1]])
    leaf = np.exp(upper[:, None] + lower).ravel()  # 0.35, 0.35, 0.27, 0.03
    n = 20_000
    roots = np.zeros(n)
    of_upper = conditional_gumbel(np.tile(upper, n), np.repeat(np.arange(n), 2), roots, rng)
    assert of_upper.reshape(n, 2).max(axis=1) == pytest.approx(roots)
    log_probs = (upper[:, None] + lower).ravel()
    of_leaves = conditional_gumbel(np.tile(log_probs, n), np.repeat(np.arange(2 * n), 2), of_upper, rng).reshape(n, 4)
    order = np.argsort(-of_leaves, axis=1)
    first = np.bincount(order[:, 0], minlength=4) / n
    assert first == pytest.approx(leaf, abs=0.015)
    expected = np.zeros(4)
    for one, two in itertools.permutations(range(4), 2):
        expected[two] += leaf[one] * leaf[two] / (1.0 - leaf[one])
    assert np.bincount(order[:, 1], minlength=4) / n == pytest.approx(expected, abs=0.015)


class NotingDCL(DCL):
    """Notes the labels of a generation."""

    labels: ClassVar[dict[Any, Any]] = {}

    def _imitate(self) -> None:
        self.labels.update({actor[0]: columns for actor, columns in self.labelled.state_dict()["columns"]})
        super()._imitate()


@dataclass
class NotingConfig(DCLConfig):
    trainer = NotingDCL


@pytest.mark.parametrize("env", [LampsEnv, single_lamps])
def test_labels_of_a_tiny_problem_are_the_actions_that_pay(env: Any) -> None:
    """Three of four rewards are paid: the right colour is worth 0.75 more than the wrong one. Of the two open doors one
    pays 0.75, where the colour is right, and both pay nothing where it is not."""
    config = NotingConfig(
        base=FirstColour(), states=100, scenarios=64, horizon=2, n_passes=1, confidence=0.99, exploration=0.3,
        states_per_update=50,
    )  # fmt: skip
    with run_of(config, functools.partial(env, 0.25)) as run:
        run.train(n_epochs=1)
    seen, actions, weights = NotingDCL.labels["colour"]
    assert len(actions["colour"]) > 10
    assert (actions["colour"] == seen["right"][:, 0]).all()
    np.testing.assert_allclose(weights["weight"], 0.75, atol=0.35)
    assert weights["weight"].mean() == pytest.approx(0.75, abs=0.1)
    seen, actions, weights = NotingDCL.labels["door"]
    assert (actions["door"] == seen["lit"].argmax(axis=1)).all()
    assert set(np.round(weights["weight"] > 0.3)) == {0.0, 1.0}


@pytest.mark.parametrize(("env", "states"), [(LampsEnv, 400), (single_lamps, 100)])
def test_dcl_becomes_better_than_its_heuristic(env: Any, states: int) -> None:
    """The heuristic gets half of 5 * 0.75 on average."""
    config = DCLConfig(
        base=FirstColour(), states=states, scenarios=32, horizon=2, generations=2, states_per_update=50, batch_size=64,
        rollout_evaluator={**default_rollout_evaluator(), "n_episodes": 60},
    )  # fmt: skip
    with run_of(config, functools.partial(env, 0.25)) as run:
        run.train()
        assert run.results.best_score > 3.2


@pytest.mark.parametrize("env", [LampsEnv, single_lamps])
def test_a_generation_of_dcl_ends_at_its_time_limit(env: Any) -> None:
    config = DCLConfig(
        base=FirstColour(), horizon=2, generations=2, generation_seconds=1.0, states_per_update=10,
        rollout_evaluator=None,
    )  # fmt: skip
    with run_of(config, functools.partial(env, 0.25)) as run:
        run.train(n_epochs=1)
        started = time.monotonic()
        run.train(n_epochs=1)
        assert 0.7 < time.monotonic() - started < 2.0
        assert run.runner.trainer.epoch == 2


@pytest.mark.parametrize("env", [LampsEnv, single_lamps])
def test_self_labelling_finds_what_pays_without_a_teacher(env: Any) -> None:
    """A random policy gets a quarter of 5."""
    config = SelfLabellingConfig(n_epochs=2, epoch_length=10, instances=8, samples=8, batch_size=16)
    with run_of(config, env) as run:
        run.train()
        assert run.results.best_score > 4.5


class NotingSelfLabelling(SelfLabelling):
    """Notes the latest samples."""

    found: ClassVar[list[Any]] = []

    def _sample(self) -> Any:
        self.found[:] = super()._sample()
        return tuple(self.found)


@dataclass
class NotingSelfLabellingConfig(SelfLabellingConfig):
    trainer = NotingSelfLabelling


@pytest.mark.parametrize("env", [LampsEnv, single_lamps])
def test_samples_are_different_and_all_there_are_if_that_many_are_wanted(env: Any) -> None:
    """Episodes of one step have two colours and two open doors: four solutions, one of which pays."""
    config = NotingSelfLabellingConfig(instances=3, samples=16, n_epochs=1, epoch_length=1)
    with run_of(config, lambda: TimeLimitWrapper.wrap(env(), max_episode_steps=1)) as run:
        run.train()
    actions, returns, is_solution = NotingSelfLabelling.found
    assert actions.shape == (2, 3, 16)
    assert is_solution.sum(axis=1).tolist() == [4, 4, 4]
    assert np.where(is_solution, returns, 0.0).sum(axis=1).tolist() == [1.0, 1.0, 1.0]
    for instance in range(3):
        assert np.unique(actions[:, instance][:, is_solution[instance]], axis=1).shape == (2, 4)


def test_equally_good_solutions_teach_nothing() -> None:
    """The mean of seven times 0.1 is rounded to less than 0.1: that is no advantage."""

    class Paid(Lamps):
        def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
            reward, is_over = super().step(actions)
            return np.where(self.substep == 1, 0.1, 0.0 * reward), is_over

    config = SelfLabellingConfig(instances=2, samples=7, n_epochs=1, epoch_length=1, rollout_evaluator=None)
    with run_of(config, lambda: TimeLimitWrapper.wrap(BatchedMazeEnv(Paid), max_episode_steps=2)) as run:
        run.train(n_epochs=1)
        before = {name: value.clone() for name, value in run.policy.networks["door"].state_dict().items()}
        run.train(n_epochs=1)
        torch.testing.assert_close(run.policy.networks["door"].state_dict(), before, rtol=0.0, atol=0.0)


def test_instances_that_are_solved_leave_the_others_as_they_are() -> None:
    """Episodes of shops of different sizes end at different times; the best ones are played again and compared."""
    config = NotingSelfLabellingConfig(instances=8, samples=2, n_epochs=1, epoch_length=2)
    with run_of(config, lambda: JobShopEnv(n_jobs=[3, 5], n_machines=[2, 4])) as run:
        run.train()
    actions, _, is_solution = NotingSelfLabelling.found
    lengths = (actions >= 0).sum(axis=0)
    assert is_solution.all()
    assert (lengths == lengths[:, :1]).all()  # number of operations
    assert len(set(lengths[:, 0])) > 2
    for instance in range(8):
        assert len(np.unique(actions[:, instance], axis=1).T) == 2


def test_the_learning_rate_of_self_labelling_follows_its_schedule() -> None:
    config = SelfLabellingConfig(n_epochs=2, epoch_length=2, instances=2, samples=2, lr=0.1, lr_schedule="linear")
    with run_of(config, LampsEnv) as run:
        run.train()
        assert run.runner.trainer.optimizer.lr == pytest.approx(0.025)
    with pytest.raises(ConfigError, match=r"algorithm\.lr_schedule: `linear` needs the number of epochs"):
        run_of(SelfLabellingConfig(n_epochs=0, lr_schedule="linear"), LampsEnv).train()


def test_self_labelling_refuses_chance() -> None:
    with pytest.raises(ConfigError, match=r"two copies of the environment with new futures differ.*Use algorithm=dcl"):
        run_of(SelfLabellingConfig(), functools.partial(LampsEnv, 0.25)).train(n_epochs=1)


def test_self_labelling_refuses_continuous_actions() -> None:
    with pytest.raises(ConfigError, match="expected Discrete actions"):
        run_of(SelfLabellingConfig(), lambda: GymMazeEnv("Pendulum-v1")).train(n_epochs=1)


@pytest.mark.parametrize("config", [DCLConfig(), SelfLabellingConfig()])
def test_an_environment_without_copies_is_refused(config: Any) -> None:
    class Alone(LampsEnv):
        def clone_from(self, env: Any, future: Any = "same") -> None:
            raise NotImplementedError("LampsEnv has no `clone_from`")

    with pytest.raises(ConfigError, match=rf"algorithm={config.name} needs copies .*has no `clone_from`"):
        run_of(config, Alone).train(n_epochs=1)
