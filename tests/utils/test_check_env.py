"""Faults planted into a sound environment, and what the checker finds."""

from __future__ import annotations

import re
import secrets
import threading
from abc import ABC
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils import EzPickle

from maze.core.env.action_conversion import ActionConversionInterface, DictActionConversion
from maze.core.env.batched_maze_env import SingleCoreEnv
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import DictObservationConversion, ObservationConversionInterface
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.utils.check_env import check_env
from maze_envs.inventory.lost_sales import LostSalesEnv

N_DRAWERS = 4


class DrawerEvents(ABC):
    @define_epoch_stats(np.mean)
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_drawer(self) -> None:
        """A drawer without anything in it was opened."""


class DrawerCoreEnv(CoreEnv):
    """Choose a drawer, then a hand to reach into it; every drawer holds a few things.

    :param fault: What is wrong; empty: nothing.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.rng = np.random.default_rng(0)
        self.events = Pubsub(self.context.event_service).create_event_topic(DrawerEvents)
        self.actor = ActorID("choose", 0)
        self.contents = [0] * N_DRAWERS
        self.chosen = 0
        self.buffer = np.zeros(N_DRAWERS, np.float32)
        if fault == "pickling":
            self.lock = threading.Lock()

    def seed(self, seed: Any) -> None:
        if self.fault != "determinism":
            self.rng = np.random.default_rng(seed)

    def reset(self) -> Any:
        self.contents = self.rng.integers(1, 4, N_DRAWERS).tolist()
        self.actor = ActorID("choose", 0)
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        if self.actor.step_key == "choose":
            self.chosen = maze_action
            agent = 1 if self.fault == "agent-id" else 0
            self.actor = ActorID("missing" if self.fault == "actor-id" else "reach", agent)
            return self.get_maze_state(), 0.0, False, {}
        self.actor = ActorID("choose", 0)
        reward = 1.0
        if self.contents[self.chosen] == 0:
            self.events.invalid_drawer()
            reward = -1.0
        else:
            self.contents[self.chosen] -= 1
        self.reward = float("nan") if self.fault == "reward" else reward
        info: Any = None if self.fault == "info" else {}
        return self.get_maze_state(), self.reward, not any(self.contents), info

    def is_step_complete(self) -> bool:
        return self.fault != "step-completion" and self.actor.step_key == "choose"

    def get_actor_rewards(self) -> np.ndarray:
        return np.full(2, self.reward if self.fault == "actor-rewards" else self.reward / 2)

    def get_maze_state(self) -> Any:
        return self

    def clone_from(self, env: Any) -> None:
        self.actor, self.chosen, self.contents = env.actor, env.chosen, list(env.contents)
        if self.fault == "cloning":
            self.contents[0] += 1
        self.rng.bit_generator.state = env.rng.bit_generator.state

    def actor_id(self) -> ActorID:
        return self.actor

    def is_actor_done(self) -> bool:
        return False

    @property
    def agent_counts_dict(self) -> Any:
        return {"choose": 1} if self.fault == "agent-counts" else {"choose": 1, "reach": 1}

    def close(self) -> None:
        if self.fault == "close":
            raise RuntimeError("the drawers are stuck")

    def get_renderer(self) -> Any: ...
    def get_serializable_components(self) -> Any: ...


class Choose(ActionConversionInterface):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def space_to_maze(self, action: Any, maze_state: Any) -> Any:
        return int(action["drawer"])

    def maze_to_space(self, maze_action: Any) -> Any:
        return {"drawer": maze_action + 1 if self.fault == "action-conversion" else maze_action}

    def space(self) -> spaces.Dict:
        return spaces.Dict({"drawer": spaces.Discrete(N_DRAWERS)})


class TwoHeads(Choose):
    def space_to_maze(self, action: Any, maze_state: Any) -> Any:
        return int(action["chosen"])

    def space(self) -> spaces.Dict:
        return spaces.Dict({"chosen": spaces.Discrete(N_DRAWERS), "other": spaces.Discrete(N_DRAWERS)})

    def maze_to_space(self, maze_action: Any) -> Any:
        raise NotImplementedError


class Reach(ActionConversionInterface):
    def space_to_maze(self, action: Any, maze_state: Any) -> Any:
        return int(action["hand"])

    def maze_to_space(self, maze_action: Any) -> Any:
        return {"hand": maze_action}

    def space(self) -> spaces.Dict:
        return spaces.Dict({"hand": spaces.Discrete(2)})


class ObserveDrawers(ObservationConversionInterface):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def maze_to_space(self, maze_state: Any) -> Any:
        dtype = np.float64 if self.fault == "observation-dtype" else np.float32
        contents = np.array(maze_state.contents, dtype)
        mask = (contents > 0).astype(np.float32)
        if self.fault == "mask-illegal":
            mask[:] = 1.0
        if self.fault == "mask-legal":
            mask[contents.argmax()] = float(np.count_nonzero(mask) == 1)
        if self.fault == "mask-empty" and contents.sum() < 4:
            mask[:] = 0.0
        if self.fault == "observation-space":
            contents = contents + 10
        if self.fault == "observation-aliasing":
            maze_state.buffer[:] = contents
            contents = maze_state.buffer
        return {"contents": contents, "drawer_mask": mask}

    def space(self) -> spaces.Dict:
        return spaces.Dict(
            {
                "contents": spaces.Box(0, 10, (N_DRAWERS,), np.float32),
                "drawer_mask": spaces.Box(0, 1, (N_DRAWERS,), np.float32),
            }
        )


class ObserveChosen(ObservationConversionInterface):
    def maze_to_space(self, maze_state: Any) -> Any:
        return {"chosen": np.array([maze_state.chosen], np.float32)}

    def space(self) -> spaces.Dict:
        return spaces.Dict({"chosen": spaces.Box(0, N_DRAWERS, (1,), np.float32)})


def drawer_env(fault: str = "") -> MazeEnv[Any]:
    return MazeEnv(
        DrawerCoreEnv(fault),
        {"choose": Choose(fault), "reach": Reach()},
        {"choose": ObserveDrawers(fault), "reach": ObserveChosen()},
    )


FAULTS = {
    "actor-id": "actor_id()",
    "agent-id": "sub-step 'reach'",
    "agent-counts": "agent_counts_dict",
    "observation-space": "sub-step 'choose', observation `contents`",
    "observation-dtype": "sub-step 'choose', observation `contents`",
    "observation-aliasing": "sub-step 'choose'",
    "reward": "sub-step 'reach'",
    "info": "sub-step 'reach'",
    "actor-rewards": "sub-step 'reach', get_actor_rewards()",
    "determinism": "sub-step 'choose', observation `contents`",
    "pickling": "MazeEnv",
    "cloning": "sub-step 'choose', observation `contents`",
    "action-conversion": "sub-step 'choose', Choose",
    "mask-empty": "sub-step 'choose', observation `drawer_mask`",
    "mask-legal": "sub-step 'choose', observation `drawer_mask`",
    "mask-illegal": "sub-step 'choose', observation `drawer_mask`",
}


def test_a_sound_environment_has_no_findings_and_nothing_is_left_unchecked():
    report = check_env(drawer_env, n_steps=80)
    assert (report.findings, report.skipped, report.n_steps) == ([], [], 80)
    assert check_env(TimeLimitWrapper.wrap(drawer_env(), max_episode_steps=5), n_steps=40).findings == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_the_one_finding_and_names_its_place(fault):
    report = check_env(partial(drawer_env, fault), n_steps=80)
    assert [finding.check for finding in report.findings] == [fault]
    assert FAULTS[fault] in report.findings[0].place
    assert report.findings[0].fix


def test_steps_that_are_never_complete_are_found_with_their_consequence():
    report = check_env(partial(drawer_env, "step-completion"), n_steps=80)
    assert {finding.check for finding in report.findings} >= {"substep-order"}


def test_errors_of_kpis_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoKpis(KpiCalculator):
        def calculate_kpis(self, episode_event_log: Any, last_maze_state: Any) -> dict[str, float]:
            return {"opened": 1 / 0}

    monkeypatch.setattr(DrawerCoreEnv, "get_kpi_calculator", lambda self: NoKpis())
    report = check_env(drawer_env, n_steps=80)
    assert [finding.check for finding in report.findings] == ["exception"]
    assert re.search("KPIs of an episode.*ZeroDivisionError", str(report))


def test_checker_findings_are_raised_as_one_error():
    with pytest.raises(EnvironmentContractError, match=r"1 finding.*\n.*\[mask-legal\] MazeEnv, sub-step 'choose'"):
        check_env(partial(drawer_env, "mask-legal"), raise_on_findings=True)


def test_copies_with_new_seeds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_env(LostSalesEnv, n_steps=60).has_chance
    assert not check_env(drawer_env, n_steps=60).has_chance
    monkeypatch.setattr(SingleCoreEnv, "new_future", lambda self, seed: self.seed(secrets.randbits(60)))
    report = check_env(LostSalesEnv, n_steps=60)
    assert [finding.check for finding in report.findings] == ["futures"]
    monkeypatch.setattr(SingleCoreEnv, "new_future", lambda self, seed: None)
    report = check_env(LostSalesEnv, n_steps=60)
    assert not report.has_chance
    assert any("new_future() changes nothing" in note for note in report.skipped)


class AuctionCoreEnv(CoreEnv):
    """A price is drawn in the third hour, and holds for the rest of the episode."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.hour, self.price = np.random.default_rng(), 0, 0.5

    def seed(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self) -> Any:
        self.hour, self.price = 0, 0.5
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        self.hour += 1
        if self.hour == 3:
            self.price = self.rng.random()
        return self.get_maze_state(), self.price, self.hour == 100, {}

    def get_maze_state(self) -> Any:
        return {"price": np.array([self.price], np.float32)}

    def clone_from(self, env: Any) -> None:
        self.rng.bit_generator.state, self.hour, self.price = env.rng.bit_generator.state, env.hour, env.price


def auction_env() -> MazeEnv[Any]:
    prices = DictObservationConversion({"price": spaces.Box(0, 1, (1,))})
    return MazeEnv(AuctionCoreEnv(), {0: DictActionConversion({"bid": spaces.Discrete(3)})}, {0: prices})


def test_chance_that_is_over_in_the_copied_state_is_found_from_the_beginning_of_the_episode():
    assert check_env(auction_env, n_steps=60).has_chance  # states are copied after 25 steps


def test_an_exception_of_close_is_a_finding():
    report = check_env(partial(drawer_env, "close"), n_steps=20)
    assert [(finding.check, finding.place) for finding in report.findings] == [("exception", "MazeEnv, close()")]
    assert "the drawers are stuck" in str(report)


def test_undeclared_agents_are_refused_where_the_environment_is_stepped():
    env = drawer_env("agent-id")
    env.seed(1)
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"'reach'.* agent 1, but .* declares 1 agent\(s\)"):
        env.step({"drawer": 0})


def test_environments_that_cannot_be_cloned_are_checked_as_far_as_possible():
    report = check_env(lambda: GymMazeEnv("CartPole-v1"), n_steps=20)
    assert report.findings == []


class Walk(gymnasium.Env[Any, int], EzPickle):
    """A simulator that its constructor makes anew when it is copied, as those of MuJoCo, Box2D and PettingZoo are."""

    observation_space = spaces.Box(-50, 50, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        EzPickle.__init__(self)
        self.position = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        self.position = int(self.np_random.integers(5, 9))
        return np.array([self.position], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position += int(action)
        return np.array([self.position], np.float32), 1.0, self.position > 20, False, {}


def test_simulators_that_begin_anew_when_copied_are_checked_without_copies_and_refuse_to_be_cloned() -> None:
    report = check_env(lambda: GymMazeEnv(Walk()), n_steps=20)
    assert report.findings == []
    assert [note.partition(":")[0] for note in report.skipped] == ["pickling", "cloning, and what masks say"]
    env, other = GymMazeEnv(Walk()), GymMazeEnv(Walk())
    env.reset()
    with pytest.raises(NotImplementedError, match=r"Walk.* cannot be cloned: copies of it begin anew"):
        other.clone_from(env)


class Drawers(MazeEnv[DrawerCoreEnv]):
    """An environment class that is passed in place of an environment."""

    def __init__(self) -> None:
        conversions = {"choose": ObserveDrawers(""), "reach": ObserveChosen()}
        super().__init__(DrawerCoreEnv(), {"choose": Choose(""), "reach": Reach()}, conversions)


class Lever(gymnasium.Env[int, int]):
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        super().reset(**kwargs)
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return action, 1.0, bool(action), False, {}


@pytest.mark.parametrize("env_class", [Drawers, Lever])
def test_a_class_is_checked_as_what_it_makes(env_class: type[Any]) -> None:
    report = check_env(env_class, n_steps=40)
    assert report.findings == []
    assert env_class.__name__ in str(report)


def test_masks_whose_action_is_not_clear_are_named():
    def make_env() -> MazeEnv[Any]:
        return MazeEnv(
            DrawerCoreEnv(),
            {"choose": TwoHeads(""), "reach": Reach()},
            {"choose": ObserveDrawers("mask-legal"), "reach": ObserveChosen()},
        )

    report = check_env(make_env, n_steps=40)
    assert any("`drawer_mask`" in note for note in report.skipped)
    assert "mask-legal" not in {finding.check for finding in report.findings}
    named = check_env(make_env, n_steps=40, masks={"drawer_mask": "chosen"})
    assert [finding.check for finding in named.findings] == ["mask-legal"]
    for masks in ({"drawer_masks": "chosen"}, {"drawer_mask": "chose"}):
        with pytest.raises(ConfigError, match=r"masks: no sub-step has the mask .*drawer_mask.* -> .*chosen"):
            check_env(make_env, n_steps=40, masks=masks)
    with pytest.raises(ConfigError, match="n_steps: expected a whole number of at least 1, found 0"):
        check_env(make_env, n_steps=0)


class Queue(gymnasium.Env[Any, int]):
    """Three orders in turn; those that are out of turn are forbidden.

    :param handling: What becomes of a forbidden order.
    """

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, handling: str = "") -> None:
        self.handling = handling
        self.n_steps = self.n_served = 0

    def mask(self) -> np.ndarray:
        if self.handling == "empty mask" and self.n_steps == 7:
            return np.zeros(3, np.int8)
        return np.eye(3, dtype=np.int8)[self.n_served % 3]

    def observed(self) -> tuple[np.ndarray, dict[str, Any]]:
        return np.array([self.n_served, self.n_served % 3], np.float32), {"action_mask": self.mask()}

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**kwargs)
        self.n_steps = self.n_served = 0
        return self.observed()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        is_forbidden = action != (self.n_served % 3)
        if is_forbidden and self.handling == "exception":
            raise ValueError("out of turn")
        if is_forbidden and self.handling == "exception for some" and action == 0:
            raise ValueError("out of turn")
        self.n_served += not (is_forbidden and self.handling == "no effect")
        observation, info = self.observed()
        if is_forbidden and self.handling == "info":
            info["out_of_turn"] = True
        return observation, float(not is_forbidden), self.n_steps == 9, False, info


@pytest.mark.parametrize("handling", ["exception", "no effect", "info", ""])
def test_a_correct_mask_is_no_finding_for_any_handling_of_forbidden_actions(handling: str) -> None:
    report = check_env(lambda: Queue(handling), n_steps=60)
    assert report.findings == []
    assert bool(report.skipped) == (handling == "")  # nothing tells whether they have to be forbidden


def test_an_action_that_is_carried_out_where_others_are_refused_is_found() -> None:
    report = check_env(lambda: Queue("exception for some"), n_steps=60)
    assert [finding.check for finding in report.findings] == ["mask-legal"]


def test_a_mask_that_an_environment_gives_in_its_info_must_allow_an_action() -> None:
    report = check_env(lambda: Queue("empty mask"), n_steps=60)
    assert ("mask-empty", "Queue, sub-step 0, observation `action_mask`") in {
        (finding.check, finding.place) for finding in report.findings
    }
