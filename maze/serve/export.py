"""Export of trained policies as bundles; needs torch."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigImportError, MazeError, install_command
from maze.core.utils.files import read_json_object
from maze.perception.blocks.recurrent.recurrent_cell import StepRun, recurrent_cells, running
from maze.report.progress import read_progress
from maze.serve.bundle_file import NEXT_STATE, STATE, packed
from maze.serve.pipeline import StepKey
from maze.serve.recording import Recording, record
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
    :param n_steps: Steps of the policy in its environment, for the reference cases and the summary of observations.
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
    policy.eval()
    policy.to("cpu")
    operations = operations_of(env)
    recording = record(policy, env, operations, n_steps, seed)
    graphs: dict[str, bytes] = {}
    networks: dict[int, dict[str, Any]] = {}  # by identity
    steps = []
    for key in env.observation_spaces_dict:
        agents = _agents(policy, key)
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
                "drift": recording.drift(key),
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
    observation_space = env.observation_spaces_dict[step_key]
    names = list(observation_space.spaces)
    batch = [_example(space) for space in observation_space.spaces.values()]
    states = {key: cell.state_size for key, cell in recurrent_cells(network).items()}
    try:
        content, heads = as_graph(network, batch, names, policy.distribution_mapper.action_heads, states)
    except ImportError as error:
        raise ConfigImportError(
            f"Exporting needs onnx, onnxscript and onnxruntime: {install_command('onnx')} ({error})."
        ) from error
    except Exception as error:  # torch raises many types
        raise ExportError(
            f"The network of sub-step {step_key!r} ({type(network).__name__}) cannot be exported as an ONNX graph"
            f"{_failing_block(network)}: {_first_line(error)}"
        ) from error
    if not heads:
        raise ExportError(f"The network of sub-step {step_key!r} has no action head among its outputs.")
    used = _input_names(content)
    return content, {
        "inputs": {name: f"observation/{name}" for name in names if f"observation/{name}" in used},
        "outputs": {head: f"logits/{head}" for head in heads},
        **({"states": states} if states else {}),
    }


def as_graph(
    network: nn.Module,
    batch: Sequence[torch.Tensor],
    names: Sequence[str],
    heads: Sequence[str],
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

    def __init__(
        self, network: nn.Module, names: Sequence[str], heads: Sequence[str], state_keys: Sequence[str]
    ) -> None:
        super().__init__()
        self.network, self.names, self.known_heads = network, list(names), list(heads)
        self.state_keys = list(state_keys)
        self.heads: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n_names = len(self.names)
        run = StepRun(dict(zip(self.state_keys, tensors[n_names:], strict=True))) if self.state_keys else None
        with running(recurrent_cells(self.network).values(), run):
            outputs = self.network(dict(zip(self.names, tensors[:n_names], strict=True)))
        self.heads = [head for head in self.known_heads if head in outputs]
        following = () if run is None else (run.final[key] for key in self.state_keys)
        return (*(outputs[head] for head in self.heads), *following)


def _example(space: spaces.Space[Any], n_rows: int = 3) -> torch.Tensor:
    """Return observations to trace a network with, `[n_rows, *shape]`: ones where possible, as masks of all actions."""
    shape = tuple(space.shape or ())
    values = np.ones(shape, np.float32)
    if isinstance(space, spaces.Box):
        values = np.clip(values, space.low, space.high).astype(np.float32)
    return torch.from_numpy(np.stack([values] * n_rows))


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


def _input_names(content: bytes) -> set[str]:
    import onnx

    return {each.name for each in onnx.load_from_string(content).graph.input}


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


def _failing_block(network: nn.Module) -> str:
    """Name the first perception block that cannot be exported by itself; empty if there is none."""
    from maze.perception.blocks import InferenceBlock, PerceptionBlock

    for name, module in network.named_modules():
        if not isinstance(module, PerceptionBlock) or isinstance(module, InferenceBlock):
            continue
        names = list(dict.fromkeys(module.in_keys))
        shapes = dict(zip(module.in_keys, module.in_shapes, strict=True))
        try:
            as_graph(module, [torch.ones((3, *shapes[key])) for key in names], names, module.out_keys)
        except Exception:  # any error identifies the block
            return f", because of its block `{name}` ({type(module).__name__})"
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# -- description ------------------------------------------------------------------------------------------------------


def _agents(policy: TorchPolicy, step_key: Any) -> dict[int | None, nn.Module]:
    """Return the networks of a sub-step by agent; None: the network of all agents."""
    if step_key not in policy.substeps_with_separate_agent_nets:
        return {None: policy.network_for(ActorID(step_key, 0))}
    return {agent: network for (key, agent), network in policy.networks.items() if key == step_key}


def _step(
    policy: TorchPolicy, env: MazeEnv[Any], step_key: Any, networks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Describe spaces, masks and distributions of a sub-step.

    :param networks: Descriptions of its networks.
    """
    entries = env.observation_spaces_dict[step_key].spaces
    used = {name for network in networks for name in network["inputs"]}
    heads = list(networks[0]["outputs"])
    descriptions = {}
    for head in heads:
        description = policy.distribution_mapper.describe_head(head)
        if description is None:
            kind = policy.distribution_mapper.distribution_class(head)
            raise ExportError(
                f"Action head `{head}` has the custom distribution {kind.__module__}.{kind.__qualname__}; a bundle "
                "can only sample from the distributions of Maze."
            )
        descriptions[head] = description
    return {
        "key": step_key,
        "n_agents": env.agent_counts_dict[step_key],
        "inputs": {name: list(entries[name].shape or ()) for name in entries if name in used},
        "masks": _masks(policy.network_for(ActorID(step_key, 0)), entries, heads),
        "heads": descriptions,
        "states": {key: size for network in networks for key, size in network.get("states", {}).items()},
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
    card["evaluation"] = _evaluation(run_dir)
    return card


def _evaluation(run_dir: Path) -> dict[str, Any]:
    """Return statistics and epoch of the evaluation with the best mean reward; empty if there is none."""
    try:
        evaluated = read_progress(run_dir).paths.get("eval")
    except MazeError:
        return {}
    rewards = np.array([] if evaluated is None else evaluated.columns.get("BaseEnvEvents/reward/mean", []))
    if evaluated is None or np.isnan(rewards).all():
        return {}
    best = int(np.nanargmax(rewards))
    statistics = {name: column[best] for name, column in evaluated.columns.items() if math.isfinite(column[best])}
    return {"epoch": int(evaluated.steps[best]), "statistics": statistics}
