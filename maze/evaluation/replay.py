"""Recorded episodes under another reward or other KPIs, and what would have become of them after another action."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy, acting_in
from maze.core.agent.random_policy import masked_heads
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.faults import USER_CODE_ERRORS, Place, fail
from maze.core.env.maze_env import MazeEnv
from maze.core.env.reward import RewardAggregatorInterface
from maze.core.env.space_arrays import ActionBounds, action_problem
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
from maze.core.rendering.step_summary import text_of
from maze.core.rendering.trajectory_page import OtherFuture, write_trajectory_page
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze.evaluation.comparison import LENGTH, RETURN, Comparison, PlayedEpisodes, aligned
from maze.evaluation.comparison_runner import measures_of
from maze.utils.env_checks.acting import same

RECORDED, REPLAYED, WHAT_IF = "recorded", "replayed", "what if"


# -- rewards and KPIs, without simulating again -----------------------------------------------------------------------


def replayed_rewards(episode: StateTrajectoryRecord, reward_aggregator: RewardAggregatorInterface) -> list[float]:
    """The rewards that an aggregator gives for what was recorded, one for each environment step.

    It gets the events of the step and the state after it, as in the simulation. Where a step has sub-steps of the
    simulation itself, it is asked once, with the events of all of them.

    :param episode: The episode.
    :param reward_aggregator: A copy of it is used.
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
        try:
            rewards.append(float(np.sum(aggregator.summarize_reward(following.maze_state))))
        except Exception as error:  # a user's code
            raise ConfigError(
                f"reward_aggregator: {type(aggregator).__name__} raised {type(error).__name__}: {error} in step {step} "
                f"of the recorded episode {episode.id}."
            ) from error
    return rewards


def replayed_measures(
    episode: StateTrajectoryRecord,
    rewards: Sequence[float],
    kpi_calculator: KpiCalculator | None,
) -> dict[str, float]:
    """Return, length and KPIs of a recorded episode.

    :param episode: The episode.
    :param rewards: One for each environment step.
    :param kpi_calculator: Gets the events that the environment has fired, and these rewards as `BaseEnvEvents.reward`;
        `None`: there are no KPIs.
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
    try:
        kpis = copy.deepcopy(kpi_calculator).calculate_kpis(log, episode.step_records[-1].maze_state)
    except Exception as error:  # a user's code
        raise ConfigError(
            f"kpi_calculator: {type(kpi_calculator).__name__} raised {type(error).__name__}: {error} for the recorded "
            f"episode {episode.id}."
        ) from error
    return {**measures, **{str(name): float(value) for name, value in kpis.items()}}


class RewardReplay(NamedTuple):
    """Recorded episodes beside themselves under another reward or other KPIs.

    :param comparison: The measures that both have.
    :param further: KPIs that only the other calculator knows; `None`: there are none.
    :param remarks: What makes the result doubtful.
    """

    comparison: Comparison
    further: Comparison | None
    remarks: list[str]


def reward_replay(
    episodes: Sequence[StateTrajectoryRecord],
    reward_aggregator: RewardAggregatorInterface | None = None,
    kpi_calculator: KpiCalculator | None = None,
    env: MazeEnv[Any] | None = None,
) -> RewardReplay:
    """Returns and KPIs of recorded episodes under another reward aggregator or KPI calculator.

    Nothing is simulated: everything comes from the recorded events and states.

    :param episodes: At least one episode.
    :param reward_aggregator: Computes rewards; `None`: they stay as recorded.
    :param kpi_calculator: Computes KPIs; `None`: the environment's own does.
    :param env: The environment that the episodes were recorded in, which is not stepped. Its own KPI calculator gives
        the KPIs to compare with, and its own reward aggregator has to give the rewards that were recorded.
    :raises ConfigError: There is no episode, or one without events.
    """
    if not episodes:
        raise ConfigError("trajectory_data: expected at least one recorded episode, found none.")
    own_kpis = None if env is None else env.get_kpi_calculator()
    before: list[dict[str, float]] = []
    after: list[dict[str, float]] = []
    for episode in episodes:
        if not _taken(episode) or any(record.step_event_log is None for record in _taken(episode)):
            raise ConfigError(
                f"Episode {episode.id} has no steps, or steps without events; rewards are computed from events, which "
                f"rollouts record with runner.record_trajectory=true."
            )
        rewards = _recorded_rewards(episode)
        before.append(replayed_measures(episode, rewards, own_kpis))
        if reward_aggregator is not None:
            rewards = replayed_rewards(episode, reward_aggregator)
        after.append(replayed_measures(episode, rewards, kpi_calculator or own_kpis))
    old, new = _joined(RECORDED, before), _joined(REPLAYED, after)
    others = {name: values for name, values in new.measures.items() if name not in old.measures}
    further = Comparison([PlayedEpisodes(REPLAYED, others)]) if others else None
    remarks = [*_unreproduced(episodes, env), *_unheard(episodes, reward_aggregator)]
    return RewardReplay(Comparison([old, new]), further, remarks)


def _joined(name: str, measures: Sequence[Mapping[str, float]]) -> PlayedEpisodes:
    common = [measure for measure in measures[0] if all(measure in each for each in measures)]
    return PlayedEpisodes(name, {each: np.array([[found[each] for found in measures]]) for each in common})


def _unreproduced(episodes: Sequence[StateTrajectoryRecord], env: MazeEnv[Any] | None) -> Iterator[str]:
    """Says where the environment's own aggregator gives another reward than was recorded."""
    parts: Mapping[str, Any] = {} if env is None else vars(env.core_env)
    own = [part for part in parts.values() if isinstance(part, RewardAggregatorInterface)]
    if len(own) != 1:
        return
    for episode in episodes:
        rewards = _recorded_rewards(episode)
        for step, (found, recorded) in enumerate(zip(replayed_rewards(episode, own[0]), rewards, strict=True)):
            if not np.isclose(found, recorded):
                yield (
                    f"The environment's own {type(own[0]).__name__} gives {found:.6g} in step {step} of episode "
                    f"{episode.id}, where {recorded:.6g} was recorded. Recorded and replayed returns differ by more "
                    f"than the change: wrappers have changed rewards or skipped steps, or the aggregator had other "
                    f"arguments."
                )
                return


def _unheard(episodes: Sequence[StateTrajectoryRecord], aggregator: RewardAggregatorInterface | None) -> Iterator[str]:
    interfaces = [] if aggregator is None else aggregator.get_interfaces()
    fired = (event.interface_class for episode in episodes for record in _taken(episode) for event in _events(record))
    if interfaces and not any(interface in interfaces for interface in fired):
        names = ", ".join(interface.__name__ for interface in interfaces)
        yield f"{type(aggregator).__name__} asks for events of {names}, of which none was recorded."


def _taken(episode: StateTrajectoryRecord) -> list[StateRecord]:
    """The records of steps, without the one of the last state."""
    return [record for record in episode.step_records if record.reward is not None]


def _recorded_rewards(episode: StateTrajectoryRecord) -> list[float]:
    return [float(np.sum(record.reward)) for record in _taken(episode)]


def _events(record: StateRecord) -> Sequence[EventRecord]:
    return [] if record.step_event_log is None else record.step_event_log.events.events


# -- what if ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WhatIf:
    """An episode, and what becomes of it after a change.

    :param recorded: The episode, played again.
    :param other: The same episode up to the change, and what has followed it.
    :param step: Environment step of the change.
    :param substep: Which of the agent's sub-steps of that step it is.
    :param change: The change in words.
    :param measures: Return, length and KPIs of both.
    :param agreement: How many of the decisions before the change the policy would have taken, and of how many; `None`:
        there is no policy.
    """

    recorded: StateTrajectoryRecord
    other: StateTrajectoryRecord
    step: int
    substep: int
    change: str
    measures: tuple[dict[str, float], dict[str, float]]
    agreement: tuple[int, int] | None

    def summary(self) -> list[tuple[str, float, float]]:
        """What both have come to: return, return and events from the change on, length, KPIs."""
        one, other = self.measures
        rows = [(name, one[name], other[name]) for name in one if name in other]
        futures = self.recorded, self.other
        ahead = [float(np.sum(_recorded_rewards(future)[self.step :])) for future in futures]
        rows.insert(1, (f"return from step {self.step} on", ahead[0], ahead[1]))
        counts = [
            Counter(event.qualified_name for record in _taken(future)[self.step :] for event in _events(record))
            for future in futures
        ]
        names = sorted({*counts[0], *counts[1]})
        return rows + [
            (f"from step {self.step} on: {name}", float(counts[0][name]), float(counts[1][name])) for name in names
        ]

    def text(self) -> str:
        """The summary for the console."""
        rows = [("", RECORDED, WHAT_IF, "difference")]
        rows += [(name, f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}" if b != a else "") for name, a, b in self.summary()]
        return "\n".join([self.headline(), *aligned(rows)])

    def headline(self) -> str:
        """What was changed, and how far the policy is the one that was recorded."""
        text = f"Step {self.step}, decision {self.substep}: {self.change}."
        if self.agreement is not None and self.agreement[1]:
            text += " Of the {1} decisions before, the policy would have taken {0} as they were.".format(
                *self.agreement
            )
        return text

    def write_page(self, path: str | Path, title: str | None = None, every_k_states: int = 1) -> Path:
        """Writes both futures side by side as one page.

        :param path: The page.
        :param title: Shown at the top; `None`: the episode's id.
        :param every_k_states: Draw only every so many states.
        """
        rows = [(name, f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}" if b != a else "") for name, a, b in self.summary()]
        other = OtherFuture(self.other, (RECORDED, WHAT_IF), self.step, self.substep, rows, self.headline())
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
    versions: str = "",
) -> WhatIf:
    """Plays a recorded episode again, changes a decision, or who decides, and plays on.

    The state in which it changes is reached by playing from the episode's seed with the recorded actions, all of which
    have to lead where they led. So the random numbers after it are those of the recorded episode as far as the
    environment draws them independently of what was done.

    :param env: The environment and the wrappers that the episode was recorded in.
    :param episode: The episode.
    :param step: Environment step of the change, from 0 on.
    :param action: The action taken there; of a dictionary, only the heads that change. `None`: the policy's.
    :param policy: Decides from there on. `None`: the recorded actions go on, where they still can.
    :param substep: Which of the agent's sub-steps of that step it is.
    :param agent_seed: Seed of the policy, which is asked from the beginning of the episode on: with the seed that it
        had, the one that was recorded draws the same.
    :param deterministic: Take the most probable actions.
    :param versions: Differences of versions, for messages.
    :raises CheckpointError: The record has no seed or no actions, or is of another environment.
    :raises ConfigError: There is no such step, or no such action.
    :raises EnvironmentContractError: The environment is not deterministic, or the recorded actions cannot go on.
    """
    if action is None and policy is None:
        raise ConfigError("what_if: name an action, a policy, or both; nothing would change.")
    player = _Player(env, episode)
    recorded = player.as_recorded(versions)
    if (step, substep) not in recorded.places:
        n_steps = recorded.places[-1][0] + 1
        if not 0 <= step < n_steps:
            raise ConfigError(f"what_if.step: the episode has the steps 0 to {n_steps - 1}, found {step}.")
        n_substeps = sum(place[0] == step for place in recorded.places)
        raise ConfigError(f"what_if.substep: step {step} has the sub-steps 0 to {n_substeps - 1}, found {substep}.")
    if policy is not None and agent_seed is not None:
        policy.seed(agent_seed)
    act = None if policy is None else acting_in(player.env, policy, deterministic)
    agreed: list[bool] = []
    changed = recorded.places.index((step, substep))
    taken: list[str] = []

    def decide(position: int, observation: Any, actor: ActorID) -> Any:
        own = None if act is None else act(observation, actor)
        if position < changed:
            before = player.actions[position][1]
            agreed.extend([] if act is None else [same(own, before)])
            return before
        if position == changed and action is not None:
            chosen = _merged(action, player.actions[position][1], observation, actor, player.env, step)
            taken.append(f"{text_of(chosen)} in place of {text_of(player.actions[position][1])}")
            return chosen
        return player.goes_on(position, observation, actor) if act is None else own

    other = player.play(decide)
    change = ", then ".join([*taken, "the recorded actions go on" if policy is None else f"{_name(policy)} decides"])
    agreement = None if act is None else (sum(agreed), len(agreed))
    measures = recorded.measures, other.measures
    return WhatIf(recorded.record, other.record, step, substep, change, measures, agreement)


class _Played(NamedTuple):
    """An episode that was played.

    :param places: Step and sub-step of each decision.
    """

    record: StateTrajectoryRecord
    measures: dict[str, float]
    places: list[tuple[int, int]]


class _Player:
    """Plays a recorded episode again."""

    def __init__(self, env: MazeEnv[Any], episode: StateTrajectoryRecord) -> None:
        record = episode.action_record
        if record is None or record.seed is None or not len(record):
            raise CheckpointError(
                f"Episode {episode.id} was recorded without its seed and actions, from which it could be played again. "
                f"Rollouts of this release record them; episodes that others record have to be seeded (`env.seed`) one "
                f"by one, before each reset."
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
        """Plays the episode.

        :param decide: Takes the number of the decision, the observation and the actor; gives an action, or `None`: the
            end.
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
            while not is_done and (action := decide(len(places), observation, env.actor_id())) is not None:
                time, call = env.get_env_time(), "step"
                observation, _, is_done, _ = env.step(action)
                places.append((step, substep))
                step, substep = (step, substep + 1) if env.get_env_time() == time else (step + 1, 0)
            env.publish_episode()
            env.publish_trajectory()  # adds the last state
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(env, f"environment in episode {self.episode.id}"), call)
        return _Played(record, measures_of(env.get_stats(LogStatsLevel.EPISODE).last_stats), places)

    def as_recorded(self, versions: str) -> _Played:
        """Plays it as it was, and compares it with the record.

        :param versions: Differences of versions, for messages.
        """
        departures: list[str] = []

        def decide(position: int, observation: Any, actor: ActorID) -> Any:
            if position == len(self.actions):
                return None
            recorded_actor, action = self.actions[position]
            problem = _problem(action, self.env.action_space)
            if tuple(actor) != tuple(recorded_actor):
                problem = f"it is the turn of {actor}, recorded was {recorded_actor}"
            departures.extend([f"at decision {position}, {problem}"] if problem else [])
            return None if problem else action

        played = self.play(decide)
        found = departures[0] if departures else _difference(self.episode, played.record)
        if found is None:
            return played
        between = _difference(played.record, self.play(decide).record)
        if between is not None:
            raise EnvironmentContractError(
                f"Episode {self.episode.id}: the environment is not deterministic. Seeded with {self.seed} and given "
                f"the same actions twice, it went two ways ({between}); only an environment whose randomness comes "
                f"from its seed alone can be played again."
            )
        raise CheckpointError(
            f"Episode {self.episode.id} goes another way than was recorded ({found}). It is of another environment, of "
            f"other arguments or wrappers, or of another version of the simulator{versions and f': {versions}'}."
        )

    def goes_on(self, position: int, observation: Any, actor: ActorID) -> Any:
        """The recorded action after a change; `None`: there is none any more.

        :raises EnvironmentContractError: It cannot be taken now.
        """
        if position == len(self.actions):
            return None
        recorded_actor, action = self.actions[position]
        problem = _problem(action, self.env.action_space) or _masked(action, observation, self.env.action_space)
        if tuple(actor) != tuple(recorded_actor):
            problem = f"it is the turn of {actor}, recorded was {recorded_actor}"
        if problem:
            raise EnvironmentContractError(
                f"Episode {self.episode.id}: the recorded actions cannot go on at decision {position} after the change "
                f"({problem}). Name a policy that goes on, what_if.policy=<option or run>."
            )
        return action


def _problem(action: Any, space: spaces.Space[Any]) -> str | None:
    """Why an action that somebody took is none of a space; environments clip what policies draw beyond its bounds."""
    return action_problem(ActionBounds(space).clip(action), space)


def _difference(expected: StateTrajectoryRecord, found: StateTrajectoryRecord) -> str | None:
    """The first difference between two recordings of an episode."""
    pairs = enumerate(zip(expected.step_records, found.step_records, strict=False))
    for step, (one, other) in pairs:
        if len(one.by_substep()) != len(other.by_substep()):
            return (
                f"in step {step} there are {len(other.by_substep())} sub-steps, {len(one.by_substep())} were recorded"
            )
        for before, after in zip(one.by_substep(), other.by_substep(), strict=True):
            for name in ("actor_id", "maze_state", "maze_action", "reward", "done"):
                recorded, now = getattr(before, name), getattr(after, name)
                if not same(recorded, now):
                    return f"in step {step}, {name} is {text_of(now)}, recorded was {text_of(recorded)}"
    if len(expected) != len(found):
        return f"it has {len(_taken(found))} steps, {len(_taken(expected))} were recorded"
    return None


def _merged(action: Any, before: Any, observation: Any, actor: ActorID, env: Any, step: int) -> Any:
    """The action that is taken in place of a recorded one, in the types of its space."""
    space = env.action_space
    where = f"what_if.action: step {step}, sub-step {actor.step_key!r}, agent {actor.agent_id}"
    if isinstance(space, spaces.Dict):
        if not isinstance(action, Mapping) and len(space.spaces) == 1:
            action = dict.fromkeys(space.spaces, action)
        known = f"{where} has the actions {', '.join(space.spaces)}"
        if not isinstance(action, Mapping):
            raise ConfigError(f"{known}; name them, such as {{{next(iter(space.spaces))}: 0}}. Found {action!r}.")
        if unknown := [str(head) for head in action if head not in space.spaces]:
            raise ConfigError(f"{known}, found {', '.join(unknown)}. what_if.substep chooses another sub-step.")
        action = {**ActionBounds(space).clip(before), **action}
    problem = action_problem(action, space) or _masked(action, observation, space)
    if problem:
        raise ConfigError(f"{where}: {problem}.")
    if isinstance(space, spaces.Dict):
        return {head: _typed(value, space.spaces[head]) for head, value in action.items()}
    return _typed(action, space)


def _typed(value: Any, space: spaces.Space[Any]) -> Any:
    return np.asarray(value, dtype=space.dtype).reshape(space.shape or ())[()]


def _masked(action: Any, observation: Any, space: spaces.Space[Any]) -> str | None:
    """Which choice a mask forbids; `None`: none."""
    if not isinstance(space, spaces.Dict) or not isinstance(observation, Mapping):
        return None
    shapes = {name: np.shape(value) for name, value in observation.items()}
    for mask, head in masked_heads(shapes, space, {})[0].items():
        start = int(getattr(space.spaces[head], "start", 0))
        allowed = (start + np.flatnonzero(np.asarray(observation[mask]) > 0)).tolist()
        if int(action[head]) not in allowed:
            return f"action `{head}`: {action[head]} is masked by `{mask}`, which allows {', '.join(map(str, allowed))}"
    return None


def _name(policy: Policy) -> str:
    return type(policy).__name__
