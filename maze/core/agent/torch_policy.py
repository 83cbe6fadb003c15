"""A policy made of torch networks and action distributions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.policy import HiddenStatesByEnvironment, Policy, StatesOfActor
from maze.core.agent.torch_model import NetworksModel, as_float_tensors
from maze.core.agent.torch_policy_output import PolicyOutput, PolicySubStepOutput
from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.utils.seeding import generator_state, seeded_generator, set_generator_state
from maze.distributions.numpy_distributions import HeadDescription, Sampler, check_logits, ranked_actions, sampler_of
from maze.distributions.utils import sample_with
from maze.perception.blocks.recurrent.recurrent_cell import Run, StepRun, recurrent_cells, running
from maze.perception.program.network_program import NumpyNetwork, in_numpy

if TYPE_CHECKING:
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID, StepKeyType
    from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
    from maze.distributions.dict import DictProbabilityDistribution
    from maze.distributions.distribution_mapper import DistributionMapper


class TorchPolicy(NetworksModel, Policy):
    """Map an actor to a network, and the network's logits to actions.

    Where a network has a :class:`~maze.perception.blocks.recurrent.recurrent_cell.RecurrentCellBlock`, each actor of
    each environment has a hidden state of its own, which begins at zero with each episode.

    :param networks: One network for each step key; for sub-steps with separate networks, one for each
        `(step_key, agent_id)`. A network maps a dictionary of observations to a dictionary of logits by action head;
        further outputs are embeddings shared with the critic.
    :param distribution_mapper: Distributions of the action heads.
    :param device: Device of the networks.
    :param substeps_with_separate_agent_nets: Step keys whose agents have networks of their own.
    """

    state_group = "policies"
    networks: dict[Any, nn.Module]

    def __init__(
        self,
        networks: Mapping[str | int, nn.Module],
        distribution_mapper: DistributionMapper,
        device: str,
        substeps_with_separate_agent_nets: list[StepKeyType] | None = None,
    ) -> None:
        super().__init__(networks, device, "policy.networks")
        self.distribution_mapper = distribution_mapper
        self.substeps_with_separate_agent_nets: list[StepKeyType] = list(substeps_with_separate_agent_nets or [])
        self.temperature = 1.0
        """Temperature of sampled actions: below 1 sharpens, above 1 flattens the distributions. Learning uses 1."""
        self._rng = np.random.default_rng()
        self._torch_generator = seeded_generator(int(self._rng.integers(2**63)))
        self._hidden_states = HiddenStatesByEnvironment()

    # -- randomness ---------------------------------------------------------------------------------------------------

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._rng.bit_generator.state = np.random.PCG64(seed).state
        self._torch_generator.manual_seed(int(self._rng.integers(2**63)))

    @override(NetworksModel)
    def rng_state(self) -> dict[str, Any]:
        return {"numpy": generator_state(self._rng), "torch": self._torch_generator.get_state()}

    @override(NetworksModel)
    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        set_generator_state(self._rng, state["numpy"])
        self._torch_generator.set_state(state["torch"])

    # -- acting -------------------------------------------------------------------------------------------------------

    @override(Policy)
    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
        logits_out: dict[str, np.ndarray] | None = None,
    ) -> ActionType:
        """Act, see :meth:`Policy.compute_action`.

        :param logits_out: See :meth:`compute_actions`.
        """
        batch = {key: np.asarray(value)[np.newaxis] for key, value in observation.items()}
        states = self._hidden_states.now(self, env, actor_id) if self.is_recurrent else None
        actions = self.compute_actions(batch, actor_id, deterministic, logits_out=logits_out, states=states)
        return {head: action[0] for head, action in actions.items()}

    def compute_actions(
        self,
        observation: Mapping[str, np.ndarray],
        actor_id: ActorID | None = None,
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
        states: StatesOfActor | None = None,
    ) -> dict[str, np.ndarray]:
        """Act for a batch of environments: no gradients, NumPy in and out.

        The network runs in the mode (`train` or `eval`) that it is in.

        :param observation: Arrays `[n_envs, ...]`.
        :param actor_id: The actor that acts in all of them.
        :param deterministic: Return deterministic (greedy) actions instead of sampling.
        :param out: Arrays `[n_envs, ...]` that the actions are written into and that are returned.
        :param logits_out: Arrays `[n_envs, ...]` that the logits are written into, by action head; others are added.
        :param states: Hidden states `[n_envs, size]` by state key (:meth:`state_sizes`), of a recurrent policy; those
            that follow are written into them. Zero where an episode begins.
        :raises NonFiniteError: A logit is NaN or infinite.
        :raises EnvironmentContractError: All actions of a row are masked.
        :raises ConfigError: The policy is recurrent, and there are no hidden states.
        """
        key = self.network_key(actor_id)
        if states is None and self.is_recurrent and self._cells[key]:
            raise ConfigError(
                f"{type(self).__name__} is recurrent: expected the hidden states of network {key!r}, found none. Pass "
                "`states`, or let it act by a rollout, a RolloutGenerator or a deployment, which carry them."
            )
        actor = self._actors.get(key)
        if actor is None:
            heads = ActionHeads(self.distribution_mapper, self._rng, self._torch_generator, str(key))
            actor = self._actors[key] = Actor(self.networks[key], heads, self._device)
        return actor.act(observation, deterministic, out, logits_out, states, self.temperature)

    @contextmanager
    def remembering(self, env: Any, actor_id: ActorID | None) -> Iterator[None]:
        """Return a context in which the network of an actor is evaluated once, for its observation in an environment.

        A recurrent network continues from its hidden state there. Repeated calls at the same step start from the same
        state.

        :param env: The environment; not needed by others.
        :param actor_id: The actor.
        """
        if not self.is_recurrent:
            yield
            return
        states = self._hidden_states.now(self, env, actor_id)
        run = StepRun(as_float_tensors({key: array.copy() for key, array in states.items()}, self._device))
        with self.running_for(actor_id, run):
            yield
        for key, array in states.items():
            array[...] = run.final[key].cpu().numpy()

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: ObservationType,
        num_candidates: int | None,
        maze_state: MazeStateType | None,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        logits: dict[str, np.ndarray] = {}
        self.compute_action(observation, maze_state, env, actor_id, deterministic=True, logits_out=logits)
        if num_candidates is not None and num_candidates < 1:
            raise ConfigError(f"`num_candidates` must be at least 1 or None, found {num_candidates}.")
        mapper = self.distribution_mapper
        heads = {head: mapper.describe_head(head) or _choices_of(mapper.action_space[head]) for head in logits}
        ranked = ranked_actions(heads, {head: values[0] for head, values in logits.items()}, num_candidates)
        return [action for action, _ in ranked], [probability for _, probability in ranked]

    # -- learning -----------------------------------------------------------------------------------------------------

    def compute_substep_policy_output(
        self,
        observation: ObservationType,
        actor_id: ActorID | None = None,
        temperature: float = 1.0,
        run: Run | None = None,
    ) -> PolicySubStepOutput:
        """Return logits and distributions, with gradients.

        :param observation: Tensors (or arrays) with any leading batch dimensions that the network takes.
        :param actor_id: The acting actor.
        :param temperature: Below 1 sharpens the distributions, above 1 flattens them.
        :param run: Source of the hidden states of a recurrent network; `None`: :meth:`running_for`.
        :raises ConfigError: The network does not return logits of the right shape for each head, or it is recurrent and
            has no hidden states.
        """
        key = self.network_key(actor_id)
        try:
            outputs = self._outputs(key, as_float_tensors(observation, self._device), run)
        except EnvironmentContractError as error:
            raise EnvironmentContractError(f"Sub-step {key!r}: {error}") from error
        heads = self.distribution_mapper.action_heads
        logits = {key: value for key, value in outputs.items() if key in heads}
        if not logits:
            raise ConfigError(
                f"policy.networks[{key!r}] returned {sorted(map(str, outputs))}, none of which is an action head. "
                f"Expected some of: {', '.join(heads)}."
            )
        embeddings = {key: value for key, value in outputs.items() if key not in heads}
        return PolicySubStepOutput(
            action_logits=logits,
            prob_dist=self.distribution_mapper.logits_dict_to_distribution(logits, temperature),
            embedding_logits=embeddings or None,
            actor_id=actor_id,
        )

    def compute_policy_output(self, record: StructuredSpacesRecord, temperature: float = 1.0) -> PolicyOutput:
        """Return outputs for all sub-steps of a record whose observations are tensors (or arrays).

        :param record: The record, with any leading batch dimensions.
        :param temperature: See :meth:`compute_substep_policy_output`.
        :raises ConfigError: See :meth:`compute_substep_policy_output`; :meth:`evaluate` takes hidden states.
        """
        return self.evaluate(record.substep_records, temperature)

    def evaluate(
        self, substeps: Sequence[Any], temperature: float = 1.0, runs: Sequence[Run] | None = None
    ) -> PolicyOutput:
        """Return outputs for sub-steps of environment steps.

        :param substeps: Records or rows with the observations and the actor of each sub-step.
        :param temperature: See :meth:`compute_substep_policy_output`.
        :param runs: Of a recurrent policy, for each sub-step where its hidden states come from.
        """
        run_of: Sequence[Run | None] = runs or [None] * len(substeps)
        return PolicyOutput(
            self.compute_substep_policy_output(substep.observation or {}, substep.actor_id, temperature, run)
            for substep, run in zip(substeps, run_of, strict=True)
        )

    # -- networks -----------------------------------------------------------------------------------------------------

    def network_for(self, actor_id: ActorID | None) -> nn.Module:
        """Return the network that acts for an actor.

        :param actor_id: The actor; `None`: the only network there is.
        :raises ConfigError: There is no network for the actor, or several ones and no actor is named.
        """
        return self.networks[self.network_key(actor_id)]

    def shares_networks_with(self, other: TorchPolicy) -> bool:
        """Return whether another policy acts with the same networks, so that both learn at once.

        :param other: The other policy, which has each network object of this one under the same key.
        """
        return all(network is other.networks.get(key) for key, network in self.networks.items())

    @override(NetworksModel)
    def _move_networks(self) -> None:
        self._actors: dict[Any, Actor] = {}
        super()._move_networks()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without compiled networks (they alias parameters of this process) and hidden states."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_actors", "_hidden_states")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _actors={}, _hidden_states=HiddenStatesByEnvironment())


NumpyFunction = Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]
"""From observations `[batch, ...]` to a network's outputs by key."""


class ActionHeads:
    """From a network's outputs to actions.

    Actions of the default distributions are sampled in NumPy from `rng`; any other distribution samples by itself, from
    `torch_generator`.

    :param distribution_mapper: Distributions of the action heads.
    :param rng: Generator for drawing in NumPy.
    :param torch_generator: Generator (on the CPU) for drawing in torch.
    :param name: Name of the network in messages.
    """

    def __init__(
        self,
        distribution_mapper: DistributionMapper,
        rng: np.random.Generator,
        torch_generator: torch.Generator,
        name: str,
    ) -> None:
        self._name = name
        self._where = f"policy.networks[{name}]"
        self._rng = rng
        mapper = distribution_mapper
        # Name, sampler, and how the logits split into categorical choices.
        self._heads = [
            (head, _sampler_for(head, mapper, torch_generator), mapper.choice_sizes(head))
            for head in mapper.action_heads
        ]

    def act(
        self,
        network: NumpyFunction,
        observation: Mapping[str, np.ndarray],
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
        temperature: float = 1.0,
    ) -> dict[str, np.ndarray]:
        """Choose actions.

        The arguments without a description are those of :meth:`TorchPolicy.compute_actions`.

        :param network: Function from observations to logits, arrays `[batch, *shape]` by key.
        :param temperature: Temperature of the distributions, above 0.
        :return: Actions `[batch, *space.shape]` by head.
        :raises ConfigError: The network does not return logits of the right shape for each head.
        """
        try:
            all_logits = network(observation)
        except EnvironmentContractError as error:
            named = EnvironmentContractError(f"Sub-step {self._name}: {error}")
            named.row = error.row
            raise named from error
        actions: dict[str, np.ndarray] = {} if out is None else out
        n_heads, rng = 0, None if deterministic else self._rng
        for head, sampler, sizes in self._heads:
            logits = all_logits.get(head)
            if logits is None:
                continue
            n_heads += 1
            check_logits(logits, sizes, head, self._where)
            if logits_out is not None:
                logits_out.setdefault(head, np.empty_like(logits))[...] = logits
            drawn = sampler(logits, rng, temperature)
            if out is None:
                actions[head] = drawn
            else:
                out[head][...] = drawn
        if n_heads == 0:
            raise ConfigError(
                f"{self._where} returned {sorted(map(str, all_logits))}, none of which is an action head. Expected "
                f"some of: {', '.join(head for head, _, _ in self._heads)}."
            )
        return actions

    def as_arrays(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Return the logits among a network's outputs as arrays; all outputs where there are none.

        :param outputs: Tensors `[batch, ...]` by key.
        :return: Arrays `[batch, ...]` of float32 or float64, by action head.
        """
        logits: dict[str, Any] = {}
        for head, _, _ in self._heads:
            if head in outputs:
                of_head = outputs[head].detach().cpu()
                if of_head.dtype not in (torch.float32, torch.float64):  # NumPy lacks some types of half precision
                    is_masked = of_head <= torch.finfo(of_head.dtype).min
                    of_head = of_head.float().masked_fill(is_masked, torch.finfo(torch.float32).min)
                logits[head] = of_head.numpy()
        return logits or outputs


class Actor:
    """One network together with its action heads.

    The network runs in NumPy where that is possible, else in torch's inference mode.

    :param network: Maps observations to logits.
    :param heads: Its action heads.
    :param device: Device of the network.
    """

    def __init__(self, network: nn.Module, heads: ActionHeads, device: str) -> None:
        self._network = network
        self._heads = heads
        self._device = device
        self._cells = list(recurrent_cells(network).values())
        self._in_numpy = self._compiled()

    @property
    def runs_in_numpy(self) -> bool:
        """Whether the network's forward pass is computed without torch."""
        return self._in_numpy is not None

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        deterministic: bool = False,
        out: dict[str, np.ndarray] | None = None,
        logits_out: dict[str, np.ndarray] | None = None,
        states: dict[str, np.ndarray] | None = None,
        temperature: float = 1.0,
    ) -> dict[str, np.ndarray]:
        """Return actions `[n_envs, ...]`, see :meth:`maze.core.agent.torch_policy.TorchPolicy.compute_actions`."""
        network = self._in_numpy
        if network is not None and not network.is_current():
            network = self._in_numpy = self._compiled()
        forward: NumpyFunction = network or self._in_torch
        if self._cells:
            assert states is not None, "passed by the policy"
            forward = partial(self._carried, states)
        return self._heads.act(forward, observation, deterministic, out, logits_out, temperature)

    def _compiled(self) -> NumpyNetwork | None:
        return in_numpy(self._network) if self._device == "cpu" else None

    def _carried(self, states: dict[str, np.ndarray], observation: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        outputs: Mapping[str, Any]
        if self._in_numpy is not None:
            final = outputs = self._in_numpy({**observation, **states})
        else:
            run = StepRun(as_float_tensors(states, self._device))
            with running(self._cells, run):
                outputs = self._in_torch(observation)
            final = {key: tensor.cpu().numpy() for key, tensor in run.final.items()}
        for key, array in states.items():
            array[...] = final[key]
        return outputs

    @torch.inference_mode()
    def _in_torch(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        return self._heads.as_arrays(self._network(as_float_tensors(observation, self._device)))


def _choices_of(space: spaces.Space[Any]) -> HeadDescription:
    """Return the choices of a head with a distribution of its own; unknown unless there is a single one."""
    if isinstance(space, spaces.Discrete):
        return {"distribution": "categorical", "n": int(space.n)}
    return {"distribution": "unknown"}


def _sampler_for(head: str, mapper: DistributionMapper, generator: torch.Generator) -> Sampler:
    """Return the NumPy sampler of the usual distributions; subclasses and all others sample by themselves."""
    description = mapper.describe_head(head)
    if description is not None:
        return sampler_of(description)
    dtype = mapper.action_space.spaces[head].dtype

    def sample(logits: np.ndarray, rng: np.random.Generator | None, temperature: float = 1.0) -> np.ndarray:
        with torch.inference_mode():
            distribution = mapper.action_head_distribution(head, torch.from_numpy(logits), temperature)
            drawn = distribution.deterministic_sample() if rng is None else sample_with(distribution, generator)
        return np.asarray(drawn.numpy().astype(dtype))

    return sample


class InitialPolicy:
    """A frozen copy of a policy.

    :param policy: The policy.
    """

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = copy.deepcopy(policy)
        self.policy.eval()
        for parameter in self.policy.parameters():
            parameter.requires_grad_(False)

    def divergence(
        self, current: DictProbabilityDistribution, observation: Mapping[str, Any], actor_id: ActorID | None
    ) -> torch.Tensor:
        """Return KL(current || initial) of joint actions for each observation, with the current policy's gradient.

        :param current: Action distributions of the policy that is trained.
        :param observation: Its observations, tensors `[B, ...]`, action masks included.
        :param actor_id: The actor.
        """
        with torch.no_grad():
            initial = self.policy.compute_substep_policy_output(dict(observation), actor_id)
        return current.joint_kl(initial.prob_dist)
