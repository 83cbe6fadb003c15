"""Adapter of PettingZoo environments, AEC or parallel, to Maze."""

from __future__ import annotations

import functools
import importlib.util
import re
from abc import ABC
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID, StepKeyType
from maze.core.errors import ConfigError, ConfigImportError, did_you_mean, install_command
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.utils.config_utils import number
from maze.core.utils.factory import locate, named_module
from maze.core.wrappers.gym_adapters import ACTION_MASK, adapted, import_modules
from maze.core.wrappers.maze_gym_env_wrapper import ForeignCoreEnv, GymActionConversion, GymObservationConversion

_NUMBERED = re.compile(r"(.*[^\d_-])[_-]?\d+")
# Largest number of agents whose returns are KPIs.
_MOST_RETURNS = 16


def as_aec(env: Any) -> Any:
    """Convert a PettingZoo environment to an AEC environment, in which one agent acts at a time.

    :param env: AEC or parallel.
    :raises ConfigError: It is neither.
    """
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.utils.conversions import parallel_to_aec

    if isinstance(env, ParallelEnv):
        return parallel_to_aec(env)
    if isinstance(env, AECEnv):
        return env
    raise ConfigError(f"env: expected an AEC or parallel environment of PettingZoo, found {env!r}.")


def _maker(name: str, where: str) -> Callable[..., Any]:
    """Return the function that makes an environment."""
    if ":" in name:
        return locate(name.replace(":", "."), where)  # type: ignore[no-any-return]  # of another package
    if "." in name or name.startswith("mpe2/"):  # the particle environments are in no registry
        made = named_module(name.replace("/", "."), where)
        maker = getattr(made, "env", None) or getattr(made, "parallel_env", None)
        if maker is None:
            raise ConfigError(
                f"{where}: the module has neither a function `env` nor `parallel_env`. Name the function that makes "
                f"the environment, {name}:<function>."
            )
        return maker  # type: ignore[no-any-return]
    import pettingzoo

    registered = {id.replace("-v", "_v"): id for id in pettingzoo.aec_registry}
    if name not in registered:
        raise ConfigError(
            f"{where}: PettingZoo has no such environment.{did_you_mean(name, registered)} Names are those of "
            "PettingZoo, such as classic/tictactoe_v3, those of mpe2, such as mpe2/simple_spread_v3, or paths of other "
            "modules and functions, such as my_package.my_env_v0 or my_package.envs:make."
        )
    return functools.partial(pettingzoo.make, "aec", registered[name])


def _made(maker: Callable[..., Any], where: str, /, **arguments: Any) -> Any:
    try:
        return maker(**arguments)
    except (TypeError, ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ConfigError(f"{where}: cannot be made with the arguments {arguments}: {error}") from error


def make_pettingzoo_env(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    policies: str | Mapping[str, str] = "by_name",
    random_opponents: float = 0.0,
    drop: Sequence[str] = (),
    encode: Mapping[str, int] | None = None,
    action_mask: bool | None = None,
    **further_kwargs: Any,
) -> PettingZooEnv:
    """Make a PettingZoo environment as a Maze environment, by name.

    :param name: Such as `classic/tictactoe_v3` or `mpe2/simple_spread_v3`; in other packages the module or function
        that makes it, `my_package.my_env_v0` or `my_package.envs:make`.
    :param kwargs: Arguments of the environment, `max_cycles` for instance.
    :param policies: See :class:`PettingZooEnv`.
    :param random_opponents: See :class:`PettingZooEnv`.
    :param drop: Observations to leave out.
    :param encode: Number of characters or items that are encoded of a text or sequence.
    :param action_mask: Whether the mask of valid actions in `infos` becomes the observation `action_mask`; `None`: if
        there is one. Masks among the observations are used anyway.
    :param further_kwargs: Further arguments of the environment, such as `render_mode`; `import`: modules to import
        first.
    :raises ConfigError: There is no such environment, a package is missing, or an argument is unknown.
    """
    import_modules(further_kwargs.pop("import", None) or ())
    where, arguments = f"env.name={name}", {**(kwargs or {}), **further_kwargs}
    if importlib.util.find_spec("pettingzoo") is None:
        raise ConfigImportError(f"{where}: PettingZoo is not installed: {install_command('pettingzoo')}.")
    make = functools.partial(_made, _maker(name, where), where, **arguments)
    return PettingZooEnv(make, policies, random_opponents, drop, encode, action_mask)


class PettingZooEnv(MazeEnv["PettingZooCoreEnv"]):
    """A PettingZoo environment as a Maze environment: its agents are actors that act in turn.

    An environment step is a round: it is complete when the next agent has acted in it already. All agents of a parallel
    environment observe the state at the beginning of the step. The reward is the sum over all agents;
    `get_actor_rewards` reports the rewards of each decision, also if they follow in a later step (see
    :meth:`~maze.core.env.structured_env.StructuredEnv.get_actor_rewards`). The return of each agent is a KPI.

    Actions of policies with different spaces are named after the policy, `speaker_action`.

    An agent that terminates before others is done; a truncated agent leaves, too, and its future is estimated by the
    value of its last observation.

    :param env: A PettingZoo environment (AEC or parallel), or a function that makes one.
    :param policies: Which agents share a policy, whose name is the step key. `by_name`: agents with equal spaces whose
        names differ only in a number (`player_0` and `player_1` share `player`); `shared`: all (`agent`); `separate`:
        none; or the step key of each agent.
    :param random_opponents: Share of episodes, 0 to 1, in which the policy acts for one random agent only, and all
        others act at random. It measures the progress of self-play, as the KPI `return_against_random`. The rewards of
        these episodes are those of this agent.
    :param drop: Observations to leave out.
    :param encode: Number of characters or items that are encoded of a text or sequence.
    :param action_mask: Whether the mask of valid actions in `infos` becomes the observation `action_mask`; `None`: if
        there is one.
    :raises ConfigError: It is not such an environment, or its agents cannot share policies in this way.
    """

    def __init__(
        self,
        env: Any | Callable[..., Any],
        policies: str | Mapping[str, str] = "by_name",
        random_opponents: float = 0.0,
        drop: Sequence[str] = (),
        encode: Mapping[str, int] | None = None,
        action_mask: bool | None = None,
    ) -> None:
        number("env.random_opponents", random_opponents, 0.0, 1.0)
        make = env if isinstance(env, type) or (callable(env) and not hasattr(env, "step")) else None
        aec_env = as_aec(env if make is None else make())
        actors = actors_of(aec_env, policies)
        if action_mask is None:
            aec_env.reset()
            infos = aec_env.infos
            action_mask = any(
                np.size(infos.get(agent, {}).get(ACTION_MASK, ())) == getattr(aec_env.action_space(agent), "n", -1)
                for agent in actors
            )
        adapters: dict[StepKeyType, AgentAdapter] = {}
        for agent, actor in actors.items():
            sides = aec_env.observation_space(agent), aec_env.action_space(agent)
            adapter = AgentAdapter(*sides, drop, encode, action_mask)
            known = adapters.setdefault(actor.step_key, adapter)
            own = (adapter.observation_space, adapter.action_space)
            if (known.observation_space, known.action_space) != own:
                raise ConfigError(
                    f"env.policies: {agent} cannot act by the policy {actor.step_key!r} of others, whose spaces differ "
                    f"from its {own[0]} and {own[1]}."
                )
        # the conversions of gymnasium environments need only their spaces
        conversions = {key: GymActionConversion(adapter) for key, adapter in adapters.items()}
        heads = {(head, repr(space)) for one in conversions.values() for head, space in one.space().spaces.items()}
        if len(dict(heads)) < len(heads):  # a model has one distribution per name
            conversions = {key: GymActionConversion(adapter, f"{key}_") for key, adapter in adapters.items()}
        super().__init__(
            core_env=PettingZooCoreEnv(aec_env, actors, adapters, random_opponents, make),
            action_conversion_dict=conversions,
            observation_conversion_dict={key: GymObservationConversion(each) for key, each in adapters.items()},
        )


class AgentAdapter(gymnasium.Env[Any, Any]):
    """Adapter of the observations and actions of the agents of one policy to spaces that networks support.

    It is the environment inside of gymnasium's wrappers, if these are needed.

    :param observation_space: Of the agents.
    :param action_space: Of the agents.
    :param drop: Observations to leave out.
    :param encode: Number of characters or items that are encoded of a text or sequence.
    :param has_mask: Whether their infos hold a mask of their actions.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        drop: Sequence[str],
        encode: Mapping[str, int] | None,
        has_mask: bool,
    ) -> None:
        self._adds_mask = self._is_dict = False
        self._all_valid = np.ones(0, np.int8)
        if has_mask and isinstance(action_space, spaces.Discrete):
            entries = observation_space.spaces if isinstance(observation_space, spaces.Dict) else None
            if ACTION_MASK not in (entries or {}):
                self._adds_mask, self._is_dict = True, entries is not None
                self._all_valid = np.ones(int(action_space.n), np.int8)
                mask = spaces.Box(0, 1, self._all_valid.shape, np.int8)
                observation_space = spaces.Dict({**(entries or {"observation": observation_space}), ACTION_MASK: mask})
        self.observation_space, self.action_space = observation_space, action_space
        self._seen: Any = None
        self._taken: Any = None
        self._wrapped = adapted(self, drop, encode)
        """The wrappers around this object; itself where none are needed."""
        self.observation_space, self.action_space = self._wrapped.observation_space, self._wrapped.action_space

    def observed(self, observation: Any, info: Mapping[str, Any]) -> Any:
        """Adapt an observation of PettingZoo."""
        if self._adds_mask:
            shown = observation if self._is_dict else {"observation": observation}
            mask = info.get(ACTION_MASK)
            observation = {**shown, ACTION_MASK: self._all_valid if mask is None else mask}
        self._seen = observation
        return self._wrapped.reset()[0]

    def taken(self, action: Any) -> Any:
        """Adapt an action to PettingZoo's environment."""
        self._wrapped.step(action)
        return self._taken

    @override(gymnasium.Env)
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._seen, {}

    @override(gymnasium.Env)
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken = action
        return self._seen, 0.0, False, False, {}


def actors_of(env: Any, policies: str | Mapping[str, str]) -> dict[str, ActorID]:
    """Return the actor of each agent.

    :param env: The environment, AEC.
    :param policies: Shared policies, see :class:`PettingZooEnv`.
    :raises ConfigError: The policies do not fit, or the environment does not name its agents.
    """
    if not (agents := list(getattr(env, "possible_agents", None) or ())):
        raise ConfigError(f"env: {env} has no `possible_agents`, which networks are built for.")
    keys = {agent: agent for agent in agents}
    if isinstance(policies, Mapping):
        keys = dict(policies)
    elif policies == "shared":
        keys = dict.fromkeys(agents, "agent")
    elif policies == "by_name":
        names = {agent: match[1] if (match := _NUMBERED.fullmatch(agent)) else agent for agent in agents}
        found = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in agents}
        for agent, name in names.items():
            if all(found[other] == found[agent] for other in agents if names[other] == name):
                keys[agent] = name
    elif policies != "separate":
        keys = {}
    if keys.keys() != set(agents):
        raise ConfigError(
            "env.policies: expected by_name, shared, separate or a policy for each of the agents "
            f"{', '.join(agents)}, found {policies!r}."
        )
    counts: Counter[str] = Counter()
    actors: dict[str, ActorID] = {}
    for agent in agents:
        actors[agent] = ActorID(keys[agent], counts[keys[agent]])
        counts[keys[agent]] += 1
    return actors


class AgentEvents(ABC):
    """Events of PettingZoo's agents."""

    def agent_return(self, agent: str, value: float, is_against_random: bool) -> None:
        """An episode is over.

        :param agent: Name of an agent that the policy acted for.
        :param value: Sum of its rewards, also of those before its first action.
        :param is_against_random: Whether all others acted at random.
        """


class AgentReturns(KpiCalculator):
    """KPIs: the return of each agent, unless there are too many, and the one against random agents."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        kpis: dict[str, float] = {}
        for record in episode_event_log.query_events(AgentEvents.agent_return):
            given = record.attributes
            name = "return_against_random" if given["is_against_random"] else f"return_{given['agent']}"
            kpis[name] = float(given["value"])
        return kpis if len(kpis) <= _MOST_RETURNS else {}


class PettingZooCoreEnv(ForeignCoreEnv):
    """A PettingZoo environment as a core environment. Its state is the observation of the next agent.

    :param env: The environment, AEC.
    :param actors: The actor that each agent is.
    :param adapters: Adapters of observations and actions, by step key.
    :param random_opponents: See :class:`PettingZooEnv`.
    :param make: Makes the environment with another `render_mode`; `None`: an environment object was given.
    """

    def __init__(
        self,
        env: Any,
        actors: Mapping[str, ActorID],
        adapters: Mapping[StepKeyType, AgentAdapter],
        random_opponents: float = 0.0,
        make: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(env)
        self.events = Pubsub(self.context.event_service).create_event_topic(AgentEvents)
        self._actors = dict(actors)
        self._adapters = dict(adapters)
        self._random_opponents = random_opponents
        self._make = make
        self._rng = np.random.default_rng()
        self._next_seed: int | None = None
        self._shares: np.ndarray = np.zeros(0)
        self._begin_episode()

    def _begin_episode(self) -> None:
        self._agent = next(iter(self._actors))
        # The only agent that the policy acts for; `None`: all agents.
        self._learner: str | None = None
        # Agents that have terminated or were truncated.
        self._over: set[str] = set()
        # Agents that have acted in this environment step.
        self._acted: set[str] = set()
        self._n_decisions = 0
        # Number of the decision that began this environment step.
        self._first_of_step = 0
        # Number of the latest decision in the episode, by agent.
        self._decisions: dict[str, int] = {}
        # Rewards of each decision since the last complete step, by its number.
        self._earned: dict[int, float] = {}
        self._returns = dict.fromkeys(self._actors, 0.0)
        self._is_step_complete = True  # no step has begun
        self._is_actor_done = False

    @override(CoreEnv)
    def reset(self) -> MazeStateType:
        seed, self._next_seed = self._next_seed, None
        self.env.reset() if seed is None else self.env.reset(seed=seed)
        self._begin_episode()
        if self._random_opponents and self._rng.random() < self._random_opponents:
            self._learner = str(self._rng.choice(list(self._actors)))
        self._to_next_decision([])
        return self._observed()

    @override(CoreEnv)
    def step(self, maze_action: MazeActionType) -> tuple[MazeStateType, float, bool, dict[Any, Any]]:
        agent = self._agent
        if self._is_step_complete:
            self._acted.clear()
            self._first_of_step = self._n_decisions
        self._acted.add(agent)
        self._decisions[agent] = self._n_decisions
        self._n_decisions += 1
        done_agents: list[str] = []
        reward = self._take(self._adapter(agent).taken(maze_action), done_agents)
        reward += self._to_next_decision(done_agents)
        is_over = self._is_over()
        info = {key: value for key, value in self.env.infos.get(agent, {}).items() if key != ACTION_MASK}
        if is_over:
            # the last observation is that of a truncated agent, if there is any
            acting = [one for one in self.env.agents if self._learner in (None, one)]
            truncated = [one for one in acting if self.env.truncations[one] and not self.env.terminations[one]]
            if acting and self._agent not in (truncated or acting):
                self._agent = (truncated or acting)[0]
            if truncated:
                info[TRUNCATION_KEY] = True
            for one in self._actors if self._learner is None else [self._learner]:
                self.events.agent_return(one, self._returns[one], self._learner is not None)
        self._is_actor_done = agent in done_agents
        self._is_step_complete = is_over or self._agent in self._acted
        if self._is_step_complete:
            # rewards of the decisions in their order, from the first one with a reward in this step
            first = min(self._first_of_step, *self._earned, self._n_decisions)
            self._shares = np.array([self._earned.get(number, 0.0) for number in range(first, self._n_decisions)])
            self._earned.clear()
        if left := [self._decisions[one] for one in done_agents if one in self._decisions]:
            info[ACTORS_DONE_KEY] = [self._n_decisions - 1 - number for number in left]
        return self._observed(), reward, is_over, info

    # -- PettingZoo's turns --------------------------------------------------------------------------------------------

    def _take(self, action: Any, done_agents: list[str]) -> float:
        """Take one step of the environment and attribute the rewards to the agents' latest decisions.

        :param done_agents: Agents that terminate are added.
        :return: The reward that counts.
        """
        env = self.env
        env.step(action)
        counted = 0.0
        for other, reward in env.rewards.items():
            earned = float(np.asarray(reward).item())  # an array of one number, too
            if not earned:
                continue
            self._returns[other] += earned
            if self._learner is None or other == self._learner:
                counted += earned
                if (number := self._decisions.get(other)) is not None:
                    self._earned[number] = self._earned.get(number, 0.0) + earned
        for other in env.agents:
            if other not in self._over and (env.terminations[other] or env.truncations[other]):
                self._over.add(other)
                if env.terminations[other]:
                    done_agents.append(other)
        return counted

    def _to_next_decision(self, done_agents: list[str]) -> float:
        """Proceed to the next agent of the policy and remove agents that have ended, as PettingZoo requires.

        :return: The reward of these steps.
        """
        env, reward = self.env, 0.0
        while not self._is_over():
            agent = env.agent_selection
            if agent in self._over or env.terminations[agent] or env.truncations[agent]:
                self._over.add(agent)
                env.step(None)
            elif self._learner is not None and agent != self._learner:
                space = env.action_space(agent)
                space.seed(int(self._rng.integers(2**31)))
                observation = env.observe(agent)
                mask = env.infos.get(agent, {}).get(ACTION_MASK)
                if isinstance(observation, Mapping):
                    mask = observation.get(ACTION_MASK, mask)
                action = space.sample() if mask is None else space.sample(np.asarray(mask, np.int8))
                reward += self._take(action, done_agents)
            else:
                self._agent = agent
                break
        return reward

    def _is_over(self) -> bool:
        return self._learner in self._over or all(agent in self._over for agent in self.env.agents)

    def _observed(self) -> MazeStateType:
        agent = self._agent
        self._maze_state = self._adapter(agent).observed(self.env.observe(agent), self.env.infos.get(agent, {}))
        return self._maze_state

    def _adapter(self, agent: str) -> AgentAdapter:
        return self._adapters[self._actors[agent].step_key]

    # -- a core environment --------------------------------------------------------------------------------------------

    @override(CoreEnv)
    def seed(self, seed: int | None) -> None:
        """Seed the next reset; later resets continue its random sequence."""
        self._next_seed = None if seed is None else int(seed)
        self._rng = np.random.default_rng(self._next_seed)

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return self._actors[self._agent]

    @override(CoreEnv)
    def is_actor_done(self) -> bool:
        return self._is_actor_done

    @override(CoreEnv)
    def is_step_complete(self) -> bool:
        return self._is_step_complete

    @override(CoreEnv)
    def get_actor_rewards(self) -> np.ndarray:
        return self._shares

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return dict(Counter(actor.step_key for actor in self._actors.values()))

    @override(CoreEnv)
    def get_kpi_calculator(self) -> AgentReturns:
        return AgentReturns()

    @override(ForeignCoreEnv)
    def _maker(self) -> Callable[..., Any] | None:
        make = self._make
        return None if make is None else lambda **arguments: as_aec(make(**arguments))
