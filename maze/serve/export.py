"""Export of trained policies as bundles; needs torch."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.policy import HiddenStates
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.env.space_values import usual_values
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigImportError, MazeError, install_command
from maze.core.utils.config_utils import whole_number
from maze.core.utils.files import read_json_object
from maze.core.wrappers.random_reset_wrapper import StepSkipWrapper
from maze.core.wrappers.wrapper import Wrapper
from maze.perception.blocks.recurrent.recurrent_cell import StepRun, recurrent_cells, running
from maze.report.progress import read_progress
from maze.serve.bundle_file import NEXT_STATE, STATE, Array, packed
from maze.serve.drift import components, entry_summaries
from maze.serve.pipeline import StepKey
from maze.serve.wrappers_as_data import Operations, operations_of, space_as_data

EXACT = 1e-5
"""Maximum difference of the logits of an exported network, relative to the largest of them."""


class ExportError(MazeError):
    """A policy, or a part of it, cannot be exported."""


def export_run(
    run_dir: Path,
    *,
    name: str | None = None,
    state_dict_file: str = "state_dict.pt",
    trusted_packages: Sequence[str] = (),
    n_steps: int = 2000,
    seed: int = 0,
    card: Mapping[str, Any] | None = None,
) -> bytes:
    """Export the policy of a training run as the bytes of a bundle.

    :param run_dir: The run's directory.
    :param name: Name of the policy; by default that of the directory.
    :param state_dict_file: File of the weights.
    :param trusted_packages: Your packages that the stored configuration may name.
    :param n_steps: Steps of the policy in its environment, for the reference cases and the summary of observations, at
        least 1.
    :param seed: Seed of environment and policy in these steps.
    :param card: Further information in JSON.
    :raises CheckpointError: The directory is not a training run, or its files cannot be read.
    :raises ExportError: A part of the policy cannot be exported.
    """
    from maze.core.rollout.rollout_runner import RolloutRunner

    env, policy = RolloutRunner.init_stored_env_and_agent(run_dir, trusted_packages, state_dict_file=state_dict_file)
    assert isinstance(policy, TorchPolicy), "the policy of a stored run"
    try:
        facts = {"name": name or run_dir.name, **_run_card(run_dir), **(card or {})}
        return export_policy(policy, env, facts, n_steps, seed)
    finally:
        env.close()


def export_policy(
    policy: TorchPolicy, env: MazeEnv[Any], card: Mapping[str, Any] | None = None, n_steps: int = 2000, seed: int = 0
) -> bytes:
    """Export a policy and its training environment as the bytes of a bundle.

    :param policy: The policy; its networks are put into evaluation mode.
    :param env: The environment with the wrappers and statistics of the training. It is seeded and stepped.
    :param card: Further information in JSON.
    :param n_steps: See :func:`export_run`.
    :param seed: See :func:`export_run`.
    :raises ExportError: A part of the policy cannot be exported.
    """
    whole_number("n_steps (--steps)", n_steps, at_least=1)
    policy.eval()
    policy.to("cpu")
    operations = operations_of(env)
    recording = record(policy, env, operations, n_steps, seed)
    graphs: dict[str, bytes] = {}
    networks: dict[int, dict[str, Any]] = {}  # by identity
    steps = []
    for key, observed in operations.environment.observation_spaces_dict.items():
        agents: dict[int | None, nn.Module] = {None: policy.network_for(ActorID(key, 0))}  # None: of all agents
        if key in policy.substeps_with_separate_agent_nets:
            agents = {agent: network for (each, agent), network in policy.networks.items() if each == key}
        for network in agents.values():
            if id(network) not in networks:
                file = f"networks/{len(networks)}.onnx"
                graphs[file], description = exported_network(network, policy, env, key)
                networks[id(network)] = {"file": file, **description}
        step = _step(policy, env, key, [networks[id(network)] for network in agents.values()])
        steps.append(
            {
                **step,
                "networks": [[agent, list(networks).index(id(network))] for agent, network in agents.items()],
                "observation_operations": operations.observations[key],
                "action_operations": operations.actions[key],
                "drift": entry_summaries(recording.converted.get(key, {}), observed),
            }
        )
    description = {
        "card": _card(policy, card or {}, operations, steps, recording),
        "networks": list(networks.values()),
        "steps": steps,
        "actor_sequence": [list(actor) for actor in recording.actor_sequence],
        "reference": recording.reference_cases(policy, {step["key"]: step["inputs"] for step in steps}),
        "episode": recording.episode,
    }
    return packed(description, graphs)


def exported_network(
    network: nn.Module, policy: TorchPolicy, env: MazeEnv[Any], step_key: StepKey
) -> tuple[bytes, dict[str, Any]]:
    """Export a network as an ONNX graph for batches of any size.

    :param network: Maps observations to logits and other outputs; it is put into evaluation mode.
    :param policy: The policy, with the action heads.
    :param env: The environment, with the observation spaces.
    :param step_key: The sub-step.
    :return: The graph, and the names in it: `inputs` by entry of the observation, `outputs` by head; of a recurrent
        network the sizes of its hidden `states`.
    :raises ExportError: The network cannot be exported.
    """
    usual = usual_values(env.observation_spaces_dict[step_key])
    names = list(usual)
    # to trace the network with: ones where possible, as masks of all actions
    batch = [torch.from_numpy(np.stack([values] * 3)).float() for values in usual.values()]
    states = {key: cell.state_size for key, cell in recurrent_cells(network).items()}
    try:
        content, heads = as_graph(network, batch, names, list(policy.distribution_mapper.action_heads), states)
    except ImportError as error:
        raise ConfigImportError(f"Exporting needs onnxscript: {install_command('onnx')} ({error}).") from error
    except Exception as error:  # torch raises many types
        named = f"The network of sub-step {step_key!r} ({type(network).__name__})"
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ExportError(f"{named} cannot be exported as an ONNX graph: {reason}") from error
    if not heads:
        raise ExportError(f"The network of sub-step {step_key!r} has no action head among its outputs.")
    import onnx

    used = {each.name for each in onnx.load_from_string(content).graph.input}
    return content, {
        "inputs": {name: f"observation/{name}" for name in names if f"observation/{name}" in used},
        "outputs": {head: f"logits/{head}" for head in heads},
        **({"states": states} if states else {}),
    }


def as_graph(
    network: nn.Module,
    batch: Sequence[torch.Tensor],
    names: list[str],
    heads: list[str],
    state_sizes: Mapping[str, int] | None = None,
) -> tuple[bytes, list[str]]:
    """Export a network as an ONNX graph with the inputs `observation/<name>` and the outputs `logits/<head>`.

    Hidden states are the inputs `state/<key>` and the outputs `next_state/<key>`.

    :param network: Maps observations by name to outputs by key.
    :param batch: Observations to trace it with, `[n_rows, *shape]`.
    :param names: Names of the observations.
    :param heads: Requested outputs; missing ones are left out.
    :param state_sizes: Sizes of its hidden states.
    :return: The graph, and the keys of its outputs.
    """
    sizes = state_sizes or {}
    graph = _LogitsOnly(network, names, heads, list(sizes))
    batch = [*batch, *(torch.zeros((len(batch[0]), size)) for size in sizes.values())]
    with torch.inference_mode():
        graph(*batch)
    if not graph.heads:
        return b"", []
    inputs = [f"observation/{name}" for name in names] + [STATE + key for key in sizes]
    outputs = [f"logits/{head}" for head in graph.heads] + [NEXT_STATE + key for key in sizes]
    return _onnx(graph, batch, inputs, outputs), graph.heads


class _LogitsOnly(nn.Module):
    """A network as a function of tensors."""

    def __init__(self, network: nn.Module, names: list[str], heads: list[str], state_keys: list[str]) -> None:
        super().__init__()
        self.network, self.names, self.known_heads, self.state_keys = network, names, heads, state_keys
        self.heads: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n_names = len(self.names)
        run = StepRun(dict(zip(self.state_keys, tensors[n_names:], strict=True))) if self.state_keys else None
        with running(recurrent_cells(self.network).values(), run):
            outputs = self.network(dict(zip(self.names, tensors[:n_names], strict=True)))
        self.heads = [head for head in self.known_heads if head in outputs]
        following = () if run is None else (run.final[key] for key in self.state_keys)
        return (*(outputs[head] for head in self.heads), *following)


def _onnx(graph: nn.Module, batch: Sequence[torch.Tensor], inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    import onnx  # noqa: F401 - torch's own error is less clear
    import onnxscript  # noqa: F401

    rows = torch.export.Dim("batch", min=1, max=2**24)
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            graph,
            tuple(batch),
            dynamo=True,
            dynamic_shapes=(tuple({0: rows} for _ in batch),),
            input_names=list(inputs),
            output_names=list(outputs),
            verbose=False,
        )
        assert program is not None, "the new exporter returns a program"
        model = program.model_proto
    # remove paths of this machine and lines of code
    for part in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    content: bytes = model.SerializeToString()
    return content


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the log messages and warnings of the exporter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- description ------------------------------------------------------------------------------------------------------


def _step(policy: TorchPolicy, env: MazeEnv[Any], key: Any, networks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe spaces, masks and distributions of a sub-step.

    :param networks: Descriptions of its networks.
    """
    entries = env.observation_spaces_dict[key].spaces
    used = {name for network in networks for name in network["inputs"]}
    heads = list(networks[0]["outputs"])
    descriptions = {}
    for head in heads:
        description = policy.distribution_mapper.describe_head(head)
        if description is None:
            kind = policy.distribution_mapper.distribution_class(head)
            own = f"{kind.__module__}.{kind.__qualname__}"
            raise ExportError(f"Action head `{head}` has the custom distribution {own}, which no bundle can contain.")
        descriptions[head] = description
    return {
        "key": key,
        "n_agents": env.agent_counts_dict[key],
        "inputs": {name: list(entries[name].shape or ()) for name in entries if name in used},
        "masks": _masks(policy.network_for(ActorID(key, 0)), entries, heads),
        "heads": descriptions,
        "states": {name: size for network in networks for name, size in network.get("states", {}).items()},
    }


def _masks(network: nn.Module, entries: Mapping[str, Any], heads: Sequence[str]) -> dict[str, str]:
    """Return observations that mask heads: those of masking blocks, and by the naming convention."""
    from maze.perception.blocks import ActionMaskingBlock

    masks = {head: f"{head}_mask" for head in heads if f"{head}_mask" in entries}
    for block in network.modules():
        if isinstance(block, ActionMaskingBlock) and block.out_keys[0] in heads and block.in_keys[1] in entries:
            masks[block.out_keys[0]] = block.in_keys[1]
    return masks


def _card(
    policy: TorchPolicy,
    given: Mapping[str, Any],
    operations: Operations,
    steps: Sequence[Mapping[str, Any]],
    recording: Recording,
) -> dict[str, Any]:
    import onnxscript

    base = operations.environment
    return {
        "name": "policy",
        "evaluation": {},
        **given,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "exported_with": {"torch": torch.__version__, "numpy": np.__version__, "onnxscript": onnxscript.__version__},
        "environment": repr(base),
        "wrappers": operations.wrappers,
        "code": operations.code,
        "steps": [
            {
                "key": step["key"],
                "n_agents": step["n_agents"],
                "observation_space": _spaces(base.observation_spaces_dict[step["key"]]),
                "action_space": _spaces(base.action_spaces_dict[step["key"]]),
                "network_inputs": step["inputs"],
                "heads": {
                    head: {
                        **space_as_data(policy.distribution_mapper.action_space.spaces[head]),
                        "distribution": step["heads"][head]["distribution"],
                    }
                    for head in step["heads"]
                },
                "masks": step["masks"],
                "hidden_states": step["states"],
            }
            for step in steps
        ],
        "n_observations": sum(map(len, recording.actors)),
        "n_parameters": sum(parameter.numel() for parameter in policy.parameters()),
    }


def _spaces(space: spaces.Dict) -> dict[str, Any]:
    return {name: space_as_data(entry) for name, entry in space.spaces.items()}


def _run_card(run_dir: Path) -> dict[str, Any]:
    """Return algorithm, command, versions and evaluation results of a run as JSON, without unreadable parts."""
    card: dict[str, Any] = {"run": run_dir.name}
    command = run_dir / "command.txt"
    if command.is_file():
        card["command"] = command.read_text().splitlines()[0].strip()
    card["versions"] = read_json_object(run_dir / "versions.json").get("versions") or {}
    training = read_json_object(run_dir / "run.json")
    card["training"] = {key: training[key] for key in ("epoch", "n_env_steps", "best_score") if key in training}
    with suppress(MazeError):
        evaluated = read_progress(run_dir).paths.get("eval")
        rewards = np.array([] if evaluated is None else evaluated.columns.get("BaseEnvEvents/reward/mean", []))
        if evaluated is not None and not np.isnan(rewards).all():
            best = int(np.nanargmax(rewards))  # the evaluation with the best mean reward
            columns = evaluated.columns.items()
            statistics = {name: column[best] for name, column in columns if math.isfinite(column[best])}
            card["evaluation"] = {"epoch": int(evaluated.steps[best]), "statistics": statistics}
    return card


# -- recording: reference cases, an episode, and summaries of observations ---------------------------------------------

MOST_CASES = 64
MOST_CASE_BYTES = 2**20
"""Size of the reference cases of one actor, and of the recorded episode."""
MOST_EPISODE_STEPS = 32


@dataclass
class Recording:
    """Result of :func:`record`.

    :param actors: Acting actors by episode.
    :param inputs: Observations of the policy by actor.
    :param states: Its hidden states `[size]` before each of them, by state key; empty where it carries none.
    :param converted: Components of observations before all wrappers, by sub-step and entry.
    :param episode: The beginning of an episode: observations of the raw environment, and network inputs; empty where
        code of the caller is between them.
    """

    actors: list[list[ActorID]] = field(default_factory=list)
    inputs: dict[ActorID, list[dict[str, Array]]] = field(default_factory=dict)
    states: dict[ActorID, list[dict[str, Array]]] = field(default_factory=dict)
    converted: dict[StepKey, dict[str, list[Array]]] = field(default_factory=dict)
    episode: list[dict[str, Any]] = field(default_factory=list)

    @property
    def actor_sequence(self) -> Sequence[ActorID]:
        """The actors of an environment step in their order; empty if it varies."""
        first = self.actors[0]
        period = next((index for index, actor in enumerate(first) if index and actor == first[0]), len(first))
        sequence = first[:period]
        is_fixed = all(actor == sequence[n % period] for actors in self.actors for n, actor in enumerate(actors))
        return sequence if is_fixed else []

    def reference_cases(self, policy: TorchPolicy, used: Mapping[StepKey, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Sample observations of the actors of each network, with the logits and greedy actions of the policy.

        :param policy: The policy.
        :param used: Entries that networks use, by sub-step.
        """
        cases, groups = [], dict[tuple[StepKey, int], list[ActorID]]()
        for actor in self.inputs:
            groups.setdefault((actor.step_key, id(policy.network_for(actor))), []).append(actor)
        for actors in groups.values():
            actor, inputs = actors[0], [each for one in actors for each in self.inputs[one]]
            before = [each for one in actors for each in self.states[one]]
            size = sum(np.asarray(inputs[0][name]).size * 4 for name in used[actor.step_key])
            n_cases = max(2, min(MOST_CASES, len(inputs), MOST_CASE_BYTES // max(size, 1)))
            chosen = [int(index) for index in np.linspace(0, len(inputs) - 1, min(n_cases, len(inputs)))]
            batch = _stacked([inputs[index] for index in chosen])
            states = _stacked([before[index] for index in chosen])
            run = StepRun({key: torch.from_numpy(array) for key, array in states.items()})
            with torch.inference_mode(), policy.running_for(actor, run):
                output = policy.compute_substep_policy_output(dict(batch), actor)
            logits = {head: values.numpy() for head, values in output.action_logits.items()}
            following = {key: values.numpy() for key, values in run.final.items()}
            copies = {key: array.copy() for key, array in states.items()}
            actions = policy.compute_actions(batch, actor, deterministic=True, states=copies)
            cases.append(
                {
                    "step_key": actor.step_key,
                    "agent_id": actor.agent_id,
                    "inputs": {name: batch[name].astype(np.float32) for name in used[actor.step_key]},
                    "logits": {head: values.astype(np.float32) for head, values in logits.items()},
                    "actions": actions,
                    **({"states": states, "next_states": following} if states else {}),
                }
            )
        return cases


class Tap(Wrapper[Any]):
    """Record the latest observation of the raw environment, before all wrappers."""

    keeps_observations_and_actions = True
    entries: Mapping[str, Any] = MappingProxyType({})

    def reset(self) -> Any:
        self.entries = self._env_reset()
        return self.entries

    def step(self, action: Any) -> Any:
        result = self._env_step(action)
        self.entries = result[0]
        return result


@contextmanager
def tapped(env: Any, operations: Operations) -> Iterator[tuple[Any, Tap]]:
    """Insert a tap around the raw environment; afterwards the environment is as before."""
    tap = Tap(operations.environment)
    if not operations.chain:
        yield tap, tap
        return

    def rewire(innermost: Any) -> None:
        operations.chain[0].env = innermost
        for wrapper in operations.chain[1:]:
            wrapper.env = wrapper.env  # rebinds its methods

    rewire(tap)
    try:
        yield env, tap
    finally:
        rewire(operations.environment)


def record(policy: TorchPolicy, env: MazeEnv[Any], operations: Operations, n_steps: int, seed: int) -> Recording:
    """Take steps with sampled actions, as in training.

    :param policy: The policy.
    :param env: Its environment.
    :param operations: The operations of its wrappers.
    :param n_steps: Number of decisions.
    :param seed: Seed of environment and policy.
    """
    with tapped(env, operations) as (seen_env, tap):
        recording = Recording()
        skips = any(type(each) is StepSkipWrapper for each in operations.chain)
        is_replayable = not any(piece["is_required"] for piece in operations.code) and not skips
        every, n_acted = max(1, n_steps // MOST_CASES), Counter[ActorID]()
        seen_env.seed(seed)
        policy.seed(seed)
        is_done, observation, n_bytes = True, {}, 0
        hidden_states = HiddenStates(1, policy.state_sizes)
        for step in range(n_steps):
            if is_done:
                observation = seen_env.reset()
                hidden_states.reset(np.ones(1, np.bool_))
                recording.actors.append([])
            actor = seen_env.actor_id()
            recording.actors[-1].append(actor)
            kept, states = recording.inputs.setdefault(actor, []), hidden_states.of(actor)
            if n_acted[actor] % every == 0 or len(kept) < 2:
                kept.append({name: np.array(value) for name, value in observation.items()})
                before = {key: array[0].copy() for key, array in states.items()}
                recording.states.setdefault(actor, []).append(before)
            n_acted[actor] += 1
            samples = recording.converted.setdefault(actor.step_key, {})
            for name, value in tap.entries.items():
                samples.setdefault(name, []).append(np.array(components(value)))
            if is_replayable and len(recording.actors) == 1 and step < MOST_EPISODE_STEPS and n_bytes < MOST_CASE_BYTES:
                case = _episode_case(operations, actor, tap.entries, observation)
                n_bytes += sum(array.nbytes for part in ("observation", "inputs") for array in case[part].values())
                recording.episode.append(case)
            actions = policy.compute_actions(_stacked([observation]), actor, states=states)  # overwrites the states
            observation, _, is_done, _ = seen_env.step({head: action[0] for head, action in actions.items()})
        return recording


def _stacked(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _episode_case(
    operations: Operations, actor: ActorID, entries: Mapping[str, Any], observation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an observation before and after the wrappers."""
    kind = operations.observations[actor.step_key][0]["kind"]
    raw: Mapping[str, Any] = entries
    if kind != "converted":
        state = operations.environment.get_maze_state()
        raw = state if kind == "dict" else dict(zip(entries, state if kind == "tuple" else [state], strict=True))
    return {
        "actor": list(actor),
        "observation": {name: np.array(raw[name]) for name in entries},
        "inputs": {name: np.array(value, np.float32) for name, value in observation.items()},
    }
