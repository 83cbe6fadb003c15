"""Replay of recorded episodes: recomputed rewards and KPIs, and counterfactual episodes after another action."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy, acting_in
from maze.core.env.action_conversion import ActionBounds, action_problem, allowed_values, masks_of_heads
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.faults import USER_CODE_ERRORS, Place, fail
from maze.core.env.maze_env import MazeEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError
from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.events.event_service import EventService
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.log_stats.log_stats import LogStatsLevel, StatsContext
from maze.core.rendering.trajectory_page import OtherFuture, text_of, write_trajectory_page
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.utils.config_utils import shown_value, whole_number
from maze.core.utils.files import aligned
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.evaluation.comparison import LENGTH, RETURN, Comparison, PlayedEpisodes, marked, measures_of
from maze.utils.check_env import same

RECORDED, REPLAYED, WHAT_IF = "recorded", "replayed", "what if"


# -- rewards and KPIs, without simulation -----------------------------------------------------------------------------


def replayed_rewards(episode: StateTrajectoryRecord, reward_aggregator: RewardAggregatorInterface) -> list[float]:
    """Compute the rewards of an aggregator from a recording, one for each environment step.

    The aggregator gets the events of the step and the state after it, as in the simulation. It is called once for a
    step with several sub-steps of the simulation, with the events of all of them.

    :param episode: The episode.
    :param reward_aggregator: The aggregator; a copy of it is used.
    :raises ConfigError: The aggregator fails.
    """
    aggregator = copy.deepcopy(reward_aggregator)
    pubsub = Pubsub(EventService())
    pubsub.register_subscriber(aggregator)
    rewards: list[float] = []
    for step, record in enumerate(_taken(episode)):
        pubsub.clear_events()
        for event in _events(record):
            pubsub.notify_event(event)
        following = episode.step_records[min(step + 1, len(episode.step_records) - 1)]
        with _errors_named("reward_aggregator", aggregator, f"in step {step} of", episode):
            rewards.append(float(np.sum(aggregator.summarize_reward(following.maze_state))))
    return rewards


def replayed_measures(
    episode: StateTrajectoryRecord, rewards: Sequence[float], kpi_calculator: KpiCalculator | None
) -> dict[str, float]:
    """Compute return, length and KPIs of a recorded episode.

    :param episode: The episode.
    :param rewards: One for each environment step.
    :param kpi_calculator: Calculator, which receives the recorded events, and these rewards as `BaseEnvEvents.reward`;
        `None`: no KPIs.
    :raises ConfigError: The calculator fails.
    """
    measures = {RETURN: float(np.sum(rewards)), LENGTH: float(len(rewards))}
    if kpi_calculator is None:
        return measures
    log = EpisodeEventLog(str(episode.id))
    for step, (record, reward) in enumerate(zip(_taken(episode), rewards, strict=True)):
        of_reward = EventRecord(BaseEnvEvents, BaseEnvEvents.reward, {"value": reward})
        events = EventCollection([of_reward, *_events(record)])
        log.step_event_logs.append(StepEventLog(step if record.env_time is None else record.env_time, events))
    with _errors_named("kpi_calculator", kpi_calculator, "for", episode):
        kpis = copy.deepcopy(kpi_calculator).calculate_kpis(log, episode.step_records[-1].maze_state)
    return {**measures, **{str(name): float(value) for name, value in kpis.items()}}


@contextmanager
def _errors_named(key: str, component: object, where: str, episode: StateTrajectoryRecord) -> Iterator[None]:
    """Return a context that names a component of the user in its errors."""
    try:
        yield
    except Exception as error:
        what = f"{key}: {type(component).__name__} raised {type(error).__name__}: {error}"
        raise ConfigError(f"{what} {where} the recorded episode {episode.id}.") from error


class RewardReplay(NamedTuple):
    """Comparison of recorded episodes with the same episodes under another reward or other KPIs.

    :param comparison: The measures that both have.
    :param further: KPIs of the other calculator only; `None`: there are none.
    """

    comparison: Comparison
    further: Comparison | None


def reward_replay(
    episodes: Sequence[StateTrajectoryRecord],
    reward_aggregator: RewardAggregatorInterface | None = None,
    kpi_calculator: KpiCalculator | None = None,
    env: MazeEnv[Any] | None = None,
) -> RewardReplay:
    """Compute returns and KPIs of recorded episodes under another reward aggregator or KPI calculator.

    Nothing is simulated: the recorded events and states are used.

    :param episodes: At least one episode.
    :param reward_aggregator: Computes rewards; `None`: they stay as recorded.
    :param kpi_calculator: Computes KPIs; `None`: that of the environment.
    :param env: The environment of the recording, which is not stepped. Its KPI calculator computes the KPIs of the
        recorded episodes.
    :raises ConfigError: There is no episode, or an episode has no events.
    """
    given: Any = episodes
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(f"episodes: expected a list of at least one recorded episode, found {shown_value(given)}.")
    own_kpis = None if env is None else env.get_kpi_calculator()
    before: list[dict[str, float]] = []
    after: list[dict[str, float]] = []
    for episode in episodes:
        if not _taken(episode) or any(record.step_event_log is None for record in _taken(episode)):
            raise ConfigError(
                f"Episode {episode.id} has no steps, or steps without events, which rewards are computed from. Record "
                f"it with runner.record_trajectory=true."
            )
        rewards = _recorded_rewards(episode)
        before.append(replayed_measures(episode, rewards, own_kpis))
        if reward_aggregator is not None:
            rewards = replayed_rewards(episode, reward_aggregator)
        after.append(replayed_measures(episode, rewards, kpi_calculator or own_kpis))
    old, new = PlayedEpisodes.of(RECORDED, [before]), PlayedEpisodes.of(REPLAYED, [after])
    others = {name: values for name, values in new.measures.items() if name not in old.measures}
    further = Comparison([PlayedEpisodes(REPLAYED, others)]) if others else None
    return RewardReplay(Comparison([old, new]), further)


def _taken(episode: StateTrajectoryRecord) -> list[StateRecord]:
    """Return the records of steps, without that of the last state."""
    return [record for record in episode.step_records if record.reward is not None]


def _recorded_rewards(episode: StateTrajectoryRecord) -> list[float]:
    return [float(np.sum(record.reward)) for record in _taken(episode)]


def _events(record: StateRecord) -> Sequence[EventRecord]:
    return [] if record.step_event_log is None else record.step_event_log.events.data


# -- what if ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WhatIf:
    """A recorded episode and its counterfactual after a change.

    :param recorded: The replayed episode.
    :param other: The same episode up to the change, and the steps after it.
    :param step: Environment step of the change.
    :param substep: Index of the decision within that step.
    :param change: Description of the change.
    :param measures: Return, length and KPIs of both.
    """

    recorded: StateTrajectoryRecord
    other: StateTrajectoryRecord
    step: int
    substep: int
    change: str
    measures: tuple[dict[str, float], dict[str, float]]

    def summary(self) -> list[tuple[str, float, float]]:
        """Return name and values of both: return, return and events from the change on, length, KPIs."""
        one, other = self.measures
        rows = [(name, one[name], other[name]) for name in one if name in other]
        futures = self.recorded, self.other
        ahead = [float(np.sum(_recorded_rewards(future)[self.step :])) for future in futures]
        rows.insert(1, (f"return from step {self.step} on", ahead[0], ahead[1]))
        before, after = (
            Counter(event.qualified_name for record in _taken(future)[self.step :] for event in _events(record))
            for future in futures
        )
        names = sorted({*before, *after})
        return rows + [(f"from step {self.step} on: {name}", float(before[name]), float(after[name])) for name in names]

    def text(self) -> str:
        """Return the summary for the console."""
        return "\n".join([self.headline(), *aligned([("", RECORDED, WHAT_IF, "difference"), *self._rows()])])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [(name, f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}" if b != a else "") for name, a, b in self.summary()]

    def headline(self) -> str:
        """Describe the change."""
        return f"Step {self.step}, decision {self.substep}: {self.change}."

    def write_page(self, path: str | Path, title: str | None = None, every_k_states: int = 1) -> Path:
        """Write an HTML page with both futures side by side.

        :param path: The file.
        :param title: Heading; `None`: the episode's id.
        :param every_k_states: Draw only every k-th state.
        """
        other = OtherFuture(self.other, (RECORDED, WHAT_IF), self.step, self.substep, self._rows(), self.headline())
        return write_trajectory_page(self.recorded, path, title=title, other=other, every_k_states=every_k_states)


def what_if(
    env: MazeEnv[Any],
    episode: StateTrajectoryRecord,
    step: int,
    action: Any = None,
    policy: Policy | None = None,
    substep: int = 0,
    agent_seed: int | None = None,
    deterministic: bool = True,
) -> WhatIf:
    """Replay a recorded episode with another action, or with another policy from a decision on.

    The state of the change is reached from the episode's seed by the recorded actions, which have to reproduce the
    recording. The random numbers after the change are those of the recorded episode as far as the environment draws
    them independently of the actions.

    :param env: The environment with the wrappers of the recording.
    :param episode: The episode.
    :param step: Environment step of the change, from 0.
    :param action: The action of that step; of a dictionary, only the heads that change. `None`: the policy's.
    :param policy: Acts after the change. `None`: the recorded actions, as long as they are valid.
    :param substep: Index of the decision within the step, from 0.
    :param agent_seed: Seed of the policy, which computes actions from the beginning of the episode: with its recorded
        seed, the recorded policy samples the same actions.
    :param deterministic: Take deterministic actions instead of sampling.
    :raises CheckpointError: The record has no seed or no actions, or the replay differs from it.
    :raises ConfigError: There is no such step, or no such action.
    :raises EnvironmentContractError: The recorded actions become invalid.
    """
    if action is None and policy is None:
        raise ConfigError("what_if: expected action, policy, or both; found none of them.")
    given = [("env", env, MazeEnv), ("episode", episode, StateTrajectoryRecord), ("policy", policy, Policy)]
    for name, value, kind in given:
        if not isinstance(value, kind) and (name, value) != ("policy", None):
            raise ConfigError(f"what_if: {name}: expected a {kind.__name__}, found {shown_value(value)}.")
    step, substep = whole_number("what_if.step", step, 0), whole_number("what_if.substep", substep, 0)
    player = _Player(env, episode)
    recorded = player.as_recorded()
    if (step, substep) not in recorded.places:
        n_steps = recorded.places[-1][0] + 1
        if step >= n_steps:
            raise ConfigError(f"what_if.step: the episode has the steps 0 to {n_steps - 1}, found {step}.")
        n_substeps = sum(place[0] == step for place in recorded.places)
        raise ConfigError(f"what_if.substep: step {step} has the sub-steps 0 to {n_substeps - 1}, found {substep}.")
    if policy is not None and agent_seed is not None:
        policy.seed(agent_seed)
    act = None if policy is None else acting_in(player.env, policy, deterministic)
    changed = recorded.places.index((step, substep))
    taken: list[str] = []

    def decide(position: int, observation: Any, actor: ActorID) -> Any:
        if act is None:
            own = None
        else:  # its generators advance as if it acted
            with player.env.context.events_dropped() if position < changed else nullcontext():
                own = act(observation, actor)
        if position < changed:
            return player.actions[position][1]
        if position == changed and action is not None:
            before = player.actions[position][1]
            chosen = _merged(action, before, observation, actor, player.env, step)
            taken.append(f"{text_of(chosen)} in place of {text_of(before)}")
            return chosen
        return player.recorded_action(position, observation, actor) if act is None else own

    other = player.play(decide)
    following = "the recorded actions" if policy is None else marked(type(policy).__name__, policy)
    change = ", then ".join([*taken, following])
    return WhatIf(recorded.record, other.record, step, substep, change, (recorded.measures, other.measures))


class _Played(NamedTuple):
    """A replayed episode.

    :param places: Step and sub-step of each decision.
    """

    record: StateTrajectoryRecord
    measures: dict[str, float]
    places: list[tuple[int, int]]


class _Player:
    """Replay a recorded episode."""

    def __init__(self, env: MazeEnv[Any], episode: StateTrajectoryRecord) -> None:
        record = episode.action_record
        if record is None or record.seed is None or not len(record):
            raise CheckpointError(
                f"Episode {episode.id} was recorded without its seed and actions, which a replay needs. Rollouts of "
                f"this release record them; in your own loop, call `env.seed` before each reset."
            )
        self.episode = episode
        self.seed: int = record.seed
        self.actions: list[tuple[ActorID, Any]] = record.actions
        self.env: Any = env
        with StatsContext():
            for wrapper in (LogStatsWrapper, TrajectoryRecordingWrapper):
                if not isinstance(self.env, wrapper):
                    self.env = wrapper(self.env)

    def play(self, decide: Callable[[int, Any, ActorID], Any]) -> _Played:
        """Play the episode.

        :param decide: Maps the number of the decision, the observation and the actor to an action; `None`: the end.
        """
        env = self.env
        places: list[tuple[int, int]] = []
        call = "reset"
        try:
            env.seed(self.seed)
            observation = env.reset()
            record: StateTrajectoryRecord = env.episode_record
            step = substep = 0
            is_done = False
            while not is_done:
                call = ""
                if (action := decide(len(places), observation, env.actor_id())) is None:
                    break
                time, call = env.get_env_time(), "step"
                observation, _, is_done, _ = env.step(action)
                places.append((step, substep))
                step, substep = (step, substep + 1) if env.get_env_time() == time else (step + 1, 0)
            env.publish_episode()
            env.publish_trajectory()  # adds the last state
        except USER_CODE_ERRORS as error:
            if not call:  # the policy's own
                raise
            fail(error, Place.of(env, f"environment in episode {self.episode.id}"), call)
        return _Played(record, measures_of(env.get_stats(LogStatsLevel.EPISODE).last_stats), places)

    def as_recorded(self) -> _Played:
        """Play the recorded actions and compare the result with the record."""
        found: str | None
        try:
            played = self.play(lambda position, _, actor: self.recorded_action(position, None, actor))
        except EnvironmentContractError as error:
            found = str(error)
        else:
            if (found := _difference(self.episode, played.record)) is None:
                return played._replace(record=self.episode)  # has the events of the policy that acted
        raise CheckpointError(
            f"Episode {self.episode.id}: the replay differs from the record ({found}). Either the environment, its "
            "arguments, the wrappers or the version of the simulator differ from the recording, or the environment is "
            "not deterministic: use generators that `seed` sets."
        )

    def recorded_action(self, position: int, observation: Any, actor: ActorID) -> Any:
        """Return a recorded action; `None`: the record has ended.

        :param observation: The observation whose masks the action must satisfy; `None`: none.
        :raises EnvironmentContractError: It is invalid, even after clipping to the bounds of the space.
        """
        if position == len(self.actions):
            return None
        (recorded_actor, action), space = self.actions[position], self.env.action_space
        problem = action_problem(ActionBounds(space).clip(action), space) or _masked(action, observation, space)
        if tuple(actor) != tuple(recorded_actor):
            problem = f"the actor is {actor}, recorded was {recorded_actor}"
        if problem:
            raise EnvironmentContractError(
                f"Episode {self.episode.id}: the recorded action of decision {position} is invalid ({problem}). After "
                "a change, set a policy that acts, what_if.policy=<option or run>."
            )
        return action


def _difference(expected: StateTrajectoryRecord, found: StateTrajectoryRecord) -> str | None:
    """Describe the first difference between two recordings of an episode."""
    for step, (one, other) in enumerate(zip(expected.step_records, found.step_records, strict=False)):
        old, new = one.by_substep(), other.by_substep()
        if len(old) != len(new):
            return f"in step {step} there are {len(new)} sub-steps, {len(old)} were recorded"
        for before, after in zip(old, new, strict=True):
            for name in ("actor_id", "maze_state", "maze_action", "reward", "done"):
                recorded, now = getattr(before, name), getattr(after, name)
                if not same(recorded, now):
                    return f"in step {step}, {name} is {text_of(now)}, recorded was {text_of(recorded)}"
    if len(expected) != len(found):
        return f"it has {len(_taken(found))} steps, {len(_taken(expected))} were recorded"
    return None


def _merged(action: Any, before: Any, observation: Any, actor: ActorID, env: Any, step: int) -> Any:
    """Merge an action into the recorded one, in the types of the space."""
    space = env.action_space
    where = f"what_if.action: step {step}, sub-step {actor.step_key!r}, agent {actor.agent_id}"
    if isinstance(space, spaces.Dict):
        if not isinstance(action, Mapping) and len(space.spaces) == 1:
            action = dict.fromkeys(space.spaces, action)
        known = f"{where} has the actions {', '.join(space.spaces)}"
        if not isinstance(action, Mapping):
            raise ConfigError(
                f"{known}; expected a mapping such as {{{next(iter(space.spaces))}: 0}}, found {action!r}."
            )
        if unknown := [str(head) for head in action if head not in space.spaces]:
            raise ConfigError(f"{known}, found {', '.join(unknown)}. what_if.substep chooses another sub-step.")
        action = {**ActionBounds(space).clip(before), **action}
    if problem := action_problem(action, space) or _masked(action, observation, space):
        raise ConfigError(f"{where}: {problem}.")
    if isinstance(space, spaces.Dict):
        return {head: _typed(value, space.spaces[head]) for head, value in action.items()}
    return _typed(action, space)


def _typed(value: Any, space: spaces.Space[Any]) -> Any:
    return np.asarray(value, dtype=space.dtype).reshape(space.shape or ())[()]


def _masked(action: Any, observation: Any, space: spaces.Space[Any]) -> str | None:
    """Describe the choice that a mask forbids; `None`: there is none."""
    if not isinstance(space, spaces.Dict) or not isinstance(observation, Mapping):
        return None
    for head, mask in masks_of_heads(observation, space).items():
        choices = zip(np.ravel(action[head]).tolist(), allowed_values(space[head], observation[mask]), strict=True)
        for value, allowed in choices:
            if value not in allowed:
                return f"action `{head}`: {value} is masked by `{mask}`, which allows {', '.join(map(str, allowed))}"
    return None
