"""Training, rollouts and evaluation from Python, with the configurations of the command line."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from maze.api.config_auditor import ConfigurationAuditor
from maze.api.config_loader import ConfigurationLoader, LoadedRun
from maze.api.process_state import output
from maze.api.rollouts import Evaluation, roll_out
from maze.api.training_run import RunResult, TrainingRun
from maze.api.utils import InvalidSpecificationError, RunContextError, RunMode
from maze.core.errors import CheckpointError
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.import_guard import imports_guarded
from maze.core.utils.storage import is_url, local_copy, working_copy
from maze.core.utils.stored_run import STORED_CONFIG, StoredRun, chosen_options

if TYPE_CHECKING:
    import gymnasium
    import pandas as pd

    from maze.core.agent.policy import Policy
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType, MazeEnv
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID
    from maze.core.wrappers.wrapper import Wrapper
    from maze.evaluation.comparison import Comparison
    from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
    from maze.perception.models.model_composer import BaseModelComposer
    from maze.perception.models.policies.base_policy_composer import BasePolicyComposer
    from maze.train.trainers.common.config_classes import AlgorithmConfig

T = TypeVar("T")

ROLLOUT_DIR = "rollout"
"""Directory of rollouts, in that of the training run."""

ROLLOUT_RUNNER = "sequential"
_SECTIONS = ("env", "wrappers", "model")
_WEIGHTS = ("state_dict.pt", "latest.pt")
_OPTION = re.compile(r"[\w-]+(/[\w-]+)*")


class RunContext:
    """Consistently configured training, rollouts and evaluation.

    Components are given as the name of a configuration module, as on the command line, as a mapping or as an object.
    Every call leaves working directory, random generators, Hydra and statistics of the process as they were.

    With `multirun`, lists (and the command line's `a,b`) among components and overrides stand for the values of
    different runs, in all combinations; properties and results then are lists with an entry for each run. Their types
    are those of one run `| Any`: as unions with lists, everybody would have to tell them apart before using them.

    >>> rc = RunContext("CartPole-v1", algorithm="ppo", silent=True)
    >>> rc.config[RunMode.TRAINING].env.name
    'CartPole-v1'

    :param env: Environment: id, module, mapping, class or function that makes one, or one to make copies of; or a
        vector environment of gymnasium, or what makes one for `num_envs` members: a training steps them all at once.
    :param run_dir: Directory to work in, or its URL (`s3://...`, `gs://...`, `file://...`), where everything is
        uploaded after each checkpoint; one that holds an earlier run continues from its model. `None`: a new
        directory below `outputs`, as on the command line.
    :param wrappers: Wrappers: module or a mapping from wrappers (class, path or name) to their arguments.
    :param algorithm: Algorithm and its hyperparameters.
    :param model: Model composer.
    :param policy: Policy composer; or the name of a policy, for rollouts without training.
    :param critic: Critic composer.
    :param launcher: Starts the runs of a `multirun`.
    :param tracking: Trackers of the training, one or a list: `tensorboard`, `wandb`, `mlflow`, `csv`; or a mapping from
        names to configurations.
    :param runner: Runner: `dev` trains in this process, `local` steps environments in others.
    :param overrides: Values, mappings or objects by their paths in the configuration, such as `algorithm.lr`.
        Names of modules are not resolved here.
    :param configuration: Name of the root configuration (`-cn` on the command line).
    :param experiment: Name of an experiment (`+experiment=` on the command line).
    :param multirun: Whether lists stand for several runs.
    :param silent: Print nothing.
    """

    def __init__(
        self,
        env: str
        | Mapping[str, Any]
        | MazeEnv[Any]
        | gymnasium.Env[Any, Any]
        | gymnasium.vector.VectorEnv[Any, Any, Any]
        | Callable[..., MazeEnv[Any] | gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv[Any, Any, Any]]
        | None = None,
        run_dir: str | None = None,
        wrappers: str | Mapping[str, Any] | Wrapper[Any] | None = None,
        algorithm: str | Mapping[str, Any] | AlgorithmConfig | None = None,
        model: str | Mapping[str, Any] | BaseModelComposer | None = None,
        policy: str | Mapping[str, Any] | BasePolicyComposer | None = None,
        critic: str | Mapping[str, Any] | BaseStateCriticComposer | None = None,
        launcher: str | Mapping[str, Any] | Launcher | None = None,
        runner: str | Mapping[str, Any] | None = None,
        overrides: dict[str, Mapping[str, Any] | Any] | None = None,
        configuration: str | None = None,
        experiment: str | None = None,
        multirun: bool = False,
        silent: bool = False,
        tracking: str | Sequence[str] | Mapping[str, Any] | None = None,
    ) -> None:
        self._silent, self._is_multirun = silent, multirun
        self._project, self._requested_dir = Path.cwd(), run_dir
        self._auditor = ConfigurationAuditor(
            {
                "env": env,
                "wrappers": wrappers,
                "algorithm": algorithm,
                "model": model,
                "policy": policy,
                "critic": critic,
                "launcher": launcher,
                "runner": runner,
            },
            overrides,
            multirun,
        )
        _check_texts(run_dir=run_dir, configuration=configuration)
        if not (multirun and isinstance(experiment, list | tuple)):
            _check_texts(experiment=experiment)
        self._auditor.audit()
        self._launcher = launcher if isinstance(launcher, Launcher) else None
        self._named_policy = isinstance(policy, str)
        self._rollouts: list[LoadedRun] = []
        self._runs: list[TrainingRun] = []
        mode = RunMode.ROLLOUT if self._named_policy else RunMode.TRAINING
        uploads = None
        if run_dir is not None and is_url(run_dir):
            if multirun or self._named_policy:
                raise InvalidSpecificationError(f"run_dir: {run_dir} is a URL, which only a single training takes.")
            uploads = working_copy(run_dir, self._project / "outputs", "run_dir")
            run_dir = str(uploads.directory)
        loader = ConfigurationLoader(self._auditor, mode, configuration, experiment, run_dir, self._project, tracking)
        with output(silent):
            loader.load()
        if self._named_policy:
            self._rollouts = loader.runs
        else:
            # Runs of a multirun work in a directory of theirs below a claimed one.
            keeps = run_dir is not None or multirun
            self._runs = [TrainingRun(loaded, self._project, keeps, silent, uploads) for loaded in loader.runs]
        self._finalizer = weakref.finalize(self, _close, self._runs)

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        trusted_packages: Sequence[str] = (),
        overrides: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> RunContext:
        """Picks up an earlier training: its policy acts, is evaluated, rolled out and trained further.

        Environment, wrappers, model, algorithm with its numbers, and seeds are those of the run. A further training
        starts from its best weights in a directory of its own.

        :param run: Directory of the training, or its URL.
        :param trusted_packages: Packages of your own whose environments and networks the run may name.
        :param overrides: Values in place of those of the run.
        :param arguments: Further arguments of the constructor; components take the place of those of the run.
        :raises InvalidSpecificationError: It is no directory of a training, or names what cannot be built again.
        """
        with imports_guarded():
            given = _stored_arguments(Path(local_copy(str(run), "load")), trusted_packages, arguments)
            stored_values = given.pop("overrides")
            return cls(**given, overrides={**stored_values, **(overrides or {})})

    # -- what it does ------------------------------------------------------------------------------------------

    def train(self, n_epochs: int | None = None, *, n_steps: int | None = None, **train_kwargs: Any) -> RunResult | Any:
        """Trains the policy; a further call trains on.

        :param n_epochs: Number of epochs; `None`: as configured.
        :param n_steps: Number of environment steps instead of epochs, rounded up to whole updates; epochs become
            shorter where whole ones would take more. The random steps that fill a replay buffer at first come on top.
        :param train_kwargs: Further arguments of the trainer.
        :return: What came of it so far: `best_score`, `path`, the table `history`.
        :raises InvalidSpecificationError: An argument is unknown; both epochs and steps are given; the algorithm takes
            no fixed number of environment steps in an epoch.
        """
        self._require_training("train")
        if self._is_multirun:
            from maze.api.multirun import train_all

            numbers = {} if n_steps is None else {"n_steps": n_steps}
            train_all(
                self._runs, self._launcher, self._requested_dir is not None, n_epochs, {**numbers, **train_kwargs}
            )
        else:
            self._runs[0].train(n_epochs, n_steps, **train_kwargs)
        return self.results

    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        """The trained policy's action.

        :param observation: What the actor observes.
        :param maze_state: State of the environment, for policies that want it.
        :param env: The environment, for policies that want it.
        :param actor_id: Who acts; `None` where there is only one.
        :param deterministic: Take the most probable action instead of drawing one.
        """
        actions = [
            policy.compute_action(observation, maze_state, env, actor_id, deterministic) for policy in self._policies()
        ]
        return self._one_or_all(actions)

    def evaluate(
        self,
        n_episodes: int | None = None,
        deterministic: bool | None = None,
        *,
        policy: Policy | None = None,
        **eval_kwargs: Any,
    ) -> Evaluation | Any:
        """Rolls the trained policy out, prints the statistics and returns them.

        :param n_episodes: Number of episodes; `None`: as in the algorithm's own evaluation.
        :param deterministic: Take the most probable actions; `None`: as in the algorithm's own evaluation.
        :param policy: Another policy to evaluate in the same episodes, such as a heuristic; needs no training before.
        :param eval_kwargs: Further arguments of `RolloutEvaluator`.
        :return: The statistics, with `mean_reward`, `kpis` and `to_frame()`.
        """
        self._require_training("evaluate")
        arguments = {"n_episodes": n_episodes, "deterministic": deterministic, **eval_kwargs}
        return self._one_or_all([run.evaluate(policy, **arguments) for run in self._runs])

    def compare(
        self,
        policies: Mapping[str, Policy] | None = None,
        n_episodes: int = 50,
        minimize: Sequence[str] = (),
        deterministic: bool = True,
        maximize: Sequence[str] = (),
    ) -> Comparison | Any:
        """Plays the same episodes with given policies, random decisions and the trained policy.

        Prints how far returns and KPIs differ and how sure that is, and writes a page, `report.html`, and tables into
        `comparison` in the run's directory.

        :param policies: Policies by name, such as heuristics; the first is what the others are compared with.
        :param n_episodes: Number of episodes.
        :param minimize: KPIs of which less is better.
        :param deterministic: Take the most probable actions.
        :param maximize: KPIs of which more is better.
        """
        self._require_training("compare")
        return self._one_or_all(
            [run.compare(policies or {}, n_episodes, minimize, maximize, deterministic) for run in self._runs]
        )

    def rollout(
        self,
        n_episodes: int | None = None,
        runner: str | Mapping[str, Any] | None = None,
        env_base_seed: int | None = None,
        agent_base_seed: int | None = None,
        *,
        policy: Policy | None = None,
        **runner_arguments: Any,
    ) -> pd.DataFrame | Any:
        """Rolls the trained policy, or the one that was named, out.

        Trajectories and event logs are written into `rollout` in the run's directory.

        :param n_episodes: Number of episodes; `None`: as configured for the runner.
        :param runner: `sequential`, `parallel` or the configuration of a rollout runner; `None`: in this process.
        :param env_base_seed: Seed of the environments; `None`: the one of the training.
        :param agent_base_seed: Seed of the policy; `None`: the one of the training.
        :param policy: Another policy instead, such as a heuristic; needs no training before.
        :param runner_arguments: Further arguments of the runner, such as `max_episode_steps`, `deterministic`,
            `record_pages`, `record_trajectory`, `record_event_logs`, `render` or `n_processes`.
        :return: Statistics with the column `value`, indexed by interface, event and statistic. `attrs` names the
            directories (`run_dir`, `trajectory_dir`, `page_dir`, `event_log_dir`) and says how many episodes were cut
            off after `max_episode_steps` (`n_cut_off`).
        """
        arguments = {f"runner.{key}": value for key, value in runner_arguments.items()}
        if n_episodes is not None:
            arguments["runner.n_episodes"] = n_episodes
        seeds = {"seeding.env_base_seed": env_base_seed, "seeding.agent_base_seed": agent_base_seed}
        arguments |= {key: seed for key, seed in seeds.items() if seed is not None}
        if self._named_policy:
            if policy is not None:
                raise InvalidSpecificationError(
                    f"rollout: policy={self._auditor.kwargs['policy']!r} was named before. Leave it out there, or here."
                )
            loaded = [self._named_rollout(run, runner, arguments) for run in self._rollouts]
        else:
            loaded = [self._rollout_of(run, policy, runner, arguments) for run in self._runs]
        return self._one_or_all([roll_out(run, self._project, self._silent) for run in loaded])

    def close(self) -> None:
        """Closes environments, worker processes and log files. Happens by itself when the object is not needed."""
        self._finalizer()

    def __enter__(self) -> RunContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[RunMode, DictConfig | list[DictConfig] | None]:
        """The configurations by run mode; `None` for a mode that this object was not made for."""
        training = self._one_or_all([run.cfg for run in self._runs]) if self._runs else None
        rollout = self._one_or_all([run.config for run in self._rollouts]) if self._rollouts else None
        return {RunMode.TRAINING: training, RunMode.ROLLOUT: rollout}

    @property
    def run_dir(self) -> str | Any | None:
        """Directory of the training; `None` as long as there is none."""
        directories = [run.result.run_dir for run in self._runs]
        if self._is_multirun:
            return [directory for directory in directories if directory is not None]
        return directories[0] if directories else None

    @property
    def policy(self) -> TorchPolicy | Any:
        """The trained policy, with the weights of the best evaluation."""
        return self._one_or_all(self._policies())

    @property
    def env_factory(self) -> Callable[[], MazeEnv[Any]] | Any:
        """Makes an environment as it is trained on, wrappers included."""
        self._require_training("env_factory")
        return self._one_or_all([run.env_factory for run in self._runs])

    @property
    def runner(self) -> Any:
        """The runner; `None` as long as nothing was trained."""
        self._require_training("runner")
        return self._one_or_all([run.runner for run in self._runs])

    @property
    def n_epochs(self) -> int | Any:
        """Number of epochs of `train` by default; 0: early stopping ends it, or 1,000 epochs."""
        self._require_training("n_epochs")
        return self._one_or_all([run.n_epochs for run in self._runs])

    @property
    def results(self) -> RunResult | Any:
        """What came of the training: status, best score, seeds and directory."""
        self._require_training("results")
        return self._one_or_all([run.result for run in self._runs])

    def results_frame(self) -> pd.DataFrame:
        """The results as a table with a row for each run."""
        self._require_training("results_frame")
        from maze.api.multirun import results_frame

        return results_frame([run.result for run in self._runs])

    # -- helpers -------------------------------------------------------------------------------------------------

    def _policies(self) -> list[TorchPolicy]:
        self._require_training("policy")
        return [run.policy for run in self._runs]

    def _one_or_all(self, values: Sequence[T]) -> T | list[T]:
        return list(values) if self._is_multirun else values[0]

    def _require_training(self, what: str) -> None:
        if self._named_policy:
            raise InvalidSpecificationError(
                f"{what}: not available for policy={self._auditor.kwargs['policy']!r}, which is only rolled out. For "
                "training, leave policy out or pass a composer such as ProbabilisticPolicyComposer(...)."
            )

    def _rollout_of(
        self, run: TrainingRun, policy: Policy | None, runner: Any, arguments: Mapping[str, Any]
    ) -> LoadedRun:
        """The rollout of the trained policy, or of another one in the training's environment."""
        if policy is None:
            policy = run.policy
        else:
            run.require_directory()
        if run.run_dir is None:
            raise RunContextError("rollout: the training has no directory.")
        seeding = run.cfg.get("seeding") or {}
        seeds = {f"seeding.{key}": value for key, value in seeding.items() if f"seeding.{key}" not in arguments}
        overrides = {"policy": policy, **seeds, **arguments}
        auditor = ConfigurationAuditor({"env": run.env_factory, "runner": runner or ROLLOUT_RUNNER}, overrides)
        return self._loaded_rollout(auditor, run.run_dir / ROLLOUT_DIR)

    def _named_rollout(self, run: LoadedRun, runner: Any, arguments: Mapping[str, Any]) -> LoadedRun:
        """The rollout of a policy that was named."""
        given = {**self._auditor.kwargs, **{key: run.swept[key] for key in run.swept if key in self._auditor.kwargs}}
        values = {**self._auditor.overrides, **{key: run.swept[key] for key in run.swept if key not in given}}
        given["runner"] = runner or given.get("runner", ROLLOUT_RUNNER)
        auditor = ConfigurationAuditor(given, {**values, **arguments})
        directory = None if self._requested_dir is None else Path(self._requested_dir) / ROLLOUT_DIR
        return self._loaded_rollout(auditor, directory)

    def _loaded_rollout(self, auditor: ConfigurationAuditor, directory: Path | None) -> LoadedRun:
        auditor.audit()
        loader = ConfigurationLoader(auditor, RunMode.ROLLOUT, run_dir=directory, project=self._project)
        loader.load()
        return loader.runs[0]


def _stored_arguments(run: Path, trusted_packages: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a RunContext that goes on from a training.

    :param run: Directory of the training.
    :param trusted_packages: Packages whose classes the run may name.
    :param given: Arguments that take the place of what the run was configured with.
    :raises InvalidSpecificationError: It is no directory of a training, or names what cannot be built again.
    """
    stored = StoredRun(run.absolute(), trusted_packages)
    directory = stored.directory
    if not (directory / STORED_CONFIG).is_file() or not any((directory / name).is_file() for name in _WEIGHTS):
        raise InvalidSpecificationError(
            f"load: {run} is not the directory of a training: expected {STORED_CONFIG.as_posix()} and "
            f"{_WEIGHTS[0]} in it. maze-run --runs lists the runs below outputs."
        )
    arguments = dict(given)
    wanted = [section for section in _SECTIONS if section not in given]
    if {"policy", "critic"} & set(given):
        wanted = [section for section in wanted if section != "model"]
    values: dict[str, Any] = {"input_dir": str(directory)}
    try:
        arguments |= stored.sections(wanted, "{0}=... as an argument of load")
        values |= _numbers(stored, "seeding")
        if "algorithm" not in given:
            values |= _numbers(stored, "algorithm")
    except CheckpointError as error:
        raise InvalidSpecificationError(f"load: {error}") from error
    if "algorithm" not in given:
        arguments["algorithm"] = _algorithm(stored)
    return {**arguments, "overrides": values}


def _algorithm(run: StoredRun) -> str:
    """The chosen option of the group; a file of a stranger may say anything else."""
    choice = chosen_options(run.directory).get("algorithm")
    if not isinstance(choice, str) or not _OPTION.fullmatch(choice):
        raise InvalidSpecificationError(
            f"load: {run.directory} does not say which algorithm it was trained with. Name it: "
            "load(..., algorithm='ppo')."
        )
    return choice


def _numbers(run: StoredRun, section: str) -> dict[str, Any]:
    """The plain values of a section by their paths: numbers and texts, nothing that is built."""
    values = run.config.value(section)
    plain = values.items() if isinstance(values, dict) else ()
    return {
        f"{section}.{key!s}": value
        for key, value in plain
        if key != TARGET_KEY and isinstance(value, bool | int | float | str)
    }


def _close(runs: Sequence[TrainingRun]) -> None:
    for run in runs:
        run.close()


def _check_texts(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, str | Path) or not str(value)):
            raise InvalidSpecificationError(f"{name}: expected a text, got {value!r}.")
