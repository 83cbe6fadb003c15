"""One stream of observations that a policy acts on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.errors import EnvironmentContractError
from maze.serve.pipeline import Actor, Memory, action_stages, check_provided, observation_stages

if TYPE_CHECKING:
    from maze.serve.bundle import PolicyBundle

Array = np.ndarray[Any, Any]


class PolicySession:
    """One episode after the other in the raw environment: stacked observations, order of actors, random numbers.

    :meth:`act` is all that is needed. Whoever acts for several sessions at once calls :meth:`prepare` of each,
    :meth:`~maze.serve.bundle.PolicyBundle.act_batch` once with what they gave, stacked, and :meth:`finish` of each; of
    recurrent policies, with :attr:`states` of each, stacked, to which the answer's are assigned then.
    A session belongs to one thread at a time.

    :param bundle: The policy.
    :param seed: Of the generator that sampled actions are drawn from; None: an unpredictable one. A
        :class:`~maze.core.agent.torch_policy.TorchPolicy` with this seed draws the same.
    :param provided: Code of the caller's own that the card lists, by its name there.
    :raises BundleError: Code is missing that there is no way around, or is not known.
    """

    def __init__(
        self, bundle: PolicyBundle, seed: int | None = None, provided: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        provided = dict(provided or {})
        check_provided(bundle.card["code"], provided)
        self.bundle = bundle
        self.rng = seeded_generator(seed)
        """Draws sampled actions; a server passes it to `act_batch`."""
        self.converted: Mapping[str, Any] = {}
        """The latest observation's entries as they left the environment, before any wrapper."""
        stages = {key: observation_stages(step.observation_operations, provided) for key, step in bundle.steps.items()}
        self._observation_stages = {key: (first, others) for key, (first, *others) in stages.items()}
        self._action_stages = {
            key: action_stages(step.action_operations, provided) for key, step in bundle.steps.items()
        }
        self._memory = Memory()
        self._sequence = bundle.actor_sequence
        self._n_prepared = 0
        self._actor: Actor = self._sequence[0] if self._sequence else (next(iter(bundle.steps)), 0)

    def reset(self, seed: int | None = None) -> None:
        """Begins another episode.

        :param seed: Begins another stream of random numbers as well; None: the present one goes on.
        """
        self._memory.clear()
        self._n_prepared = 0
        if seed is not None:
            self.rng = seeded_generator(seed)

    def act(
        self, observation: Any, actor_id: Actor | None = None, *, deterministic: bool = True, temperature: float = 1.0
    ) -> Any:
        """The action for an observation of the raw environment. Observations come one by one in their order.

        :param observation: What the raw environment shows. Where the environment's own code converts its states, and
            the caller has not provided it: the entries that it makes of them, as a mapping.
        :param actor_id: Who acts: step key and number of the agent. By default who is next in the fixed order.
        :param deterministic: Take the most probable action instead of drawing one.
        :param temperature: Below 1 sharpens the distribution that is drawn from, above 1 flattens it.
        :return: An action as the raw environment takes it; the action's entries as a mapping where its own code
            converts them, and the caller has not provided it.
        :raises EnvironmentContractError: The observation has another shape or type than in training, or all actions
            are masked.
        :raises NonFiniteError: The observation or a logit is not finite.
        """
        inputs = self.prepare(observation, actor_id)
        if inputs is None:
            return self.finish(None)
        step_key, agent_id = self._actor
        rng = None if deterministic else self.rng
        if not self.bundle.is_recurrent:
            return self.finish(self.bundle._act_one(step_key, agent_id, inputs, rng, temperature)[0])
        action, following = self.bundle._act_one(step_key, agent_id, {**inputs, **self.states}, rng, temperature)
        self.states = {key: array[0] for key, array in following.items()}
        return self.finish(action)

    @property
    def states(self) -> dict[str, Array]:
        """Hidden states `[size]` by state key that the latest actor's network decides with; zero where an episode
        begins, empty where it carries none. Those that follow a decision are assigned."""
        if not self.bundle.is_recurrent:
            return {}
        states = self._memory.states.get(self._actor)
        if states is None:
            step_key, agent_id = self._actor
            sizes = self.bundle.steps[step_key].network(agent_id).state_sizes
            states = {key: np.zeros(size, np.float32) for key, size in sizes.items()}
        return states

    @states.setter
    def states(self, states: dict[str, Array]) -> None:
        self._memory.states[self._actor] = states

    def prepare(self, observation: Any, actor_id: Actor | None = None) -> dict[str, Array] | None:
        """What the network of the acting actor takes, float32 `[*shape]` by name, without a batch dimension.

        :param observation: See :meth:`act`.
        :param actor_id: See :meth:`act`.
        :return: None where no decision is due, since the last one holds for several steps; :meth:`finish` is called
            with None then.
        """
        if actor_id is not None:
            actor = (actor_id[0], int(actor_id[1]))
        elif self._sequence:
            actor = self._sequence[self._n_prepared % len(self._sequence)]
        else:
            raise EnvironmentContractError(
                "The order of actors is not fixed; say who acts: actor_id=(step key, agent), of "
                f"{list(self.bundle.steps)}."
            )
        step = self.bundle.step(actor[0])
        first, others = self._observation_stages[actor[0]]
        entries = self.converted = first(observation, self._memory, actor)
        if others:
            entries = dict(entries)  # stages change it
            for stage in others:
                entries = stage(entries, self._memory, actor)
                if entries is None:
                    break
        self._actor = actor
        self._n_prepared += 1
        return None if entries is None else step.network_inputs_of(entries)

    def finish(self, action: Mapping[str, Any] | None, is_packed: bool = True) -> Any:
        """The raw environment's action for what the network's heads have chosen.

        :param action: `[*space.shape]` by head: one row of what `act_batch` gave. None where :meth:`prepare` gave None.
        :param is_packed: As the raw environment takes it; otherwise by entry, as Maze's environments take it.
        """
        result: Any = action
        stages = self._action_stages[self._actor[0]]
        for stage in stages if is_packed else stages[:-1]:
            if result is None and not self._memory.is_repeating:
                raise EnvironmentContractError("finish: there is no action, although a decision was due.")
            result = stage(result, self._memory, self._actor)
        return result


def seeded_generator(seed: int | None) -> np.random.Generator:
    """The generator that a policy of torch with this seed draws its actions from."""
    rng = np.random.Generator(np.random.PCG64(seed))
    rng.integers(2**63)  # the policy seeds its generator of torch with it
    return rng
