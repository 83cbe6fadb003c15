"""Plays an episode for the decision inspector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.console.runs import Progress
from maze.core.annotations import override
from maze.core.env.faults import USER_CODE_ERRORS, Place, fail
from maze.core.errors import ConfigError, MazeError
from maze.core.rendering.trajectory_page import write_trajectory_page
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import CollectionOfConfigType, Factory
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.recording_wrapper import with_frames
from maze.evaluation.comparison import RETURN
from maze.evaluation.comparison_runner import env_and_policy, played_measures, trainings_of, wrappers_for
from maze.evaluation.inspection import inspected_episode
from maze.report.video import check_video_file, write_video
from maze.runner import Runner

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.torch_actor_critic import TorchActorCritic

EPISODE_FILE = "episode.html"
_CHOICES: Mapping[str, Callable[[int], int]] = {
    "best": lambda n: n - 1,
    "worst": lambda n: 0,
    "median": lambda n: (n - 1) // 2,
}
"""Place of the chosen episode among all, the worst one first."""


@dataclass
class InspectionRunner(Runner):
    """Plays an episode and writes a page in which every decision can be looked at.

    :param policies: As those of a comparison. The first one acts; the others are asked what they would have done, with
        its wrappers, so that they have to understand the same observations.
    :param max_episode_steps: Steps after which the episode is cut off; 0: never.
    :param deterministic: Take the most probable actions.
    :param n_episodes: How many episodes are played to choose from.
    :param choose: Which of them is shown, by its return: `best`, `worst` or `median`.
    :param video: A film of it, named by a file that ends in .mp4 or .gif; `None`: none.
    :param frames_per_second: Steps in a second of the film.
    :param gamma: Discount factor of temporal-difference errors; `None`: that of the training, or 0.99.
    :param every_k_states: Draw only every so many states of the episode.
    """

    policies: CollectionOfConfigType
    max_episode_steps: int = 0
    deterministic: bool = True
    n_episodes: int = 1
    choose: str = "median"
    video: str | None = None
    frames_per_second: int = 30
    gamma: float | None = None
    every_k_states: int = 1

    def __post_init__(self) -> None:
        self.max_episode_steps = whole_number("runner.max_episode_steps", self.max_episode_steps or 0, at_least=0)
        self.every_k_states = whole_number("runner.every_k_states", self.every_k_states, at_least=1)
        self.n_episodes = whole_number("runner.n_episodes", self.n_episodes, at_least=1)
        self.frames_per_second = whole_number("runner.frames_per_second", self.frames_per_second, at_least=1)
        if self.choose not in _CHOICES:
            raise ConfigError(f"runner.choose: expected {', '.join(_CHOICES)}, found {self.choose!r}.")
        if self.video is not None:
            check_video_file(Path(self.video))
        if not isinstance(self.policies, Mapping) or not self.policies:
            raise ConfigError(
                f"policies: expected the policy that acts, such as policies=[outputs/<name>/<time>], found "
                f"{self.policies!r}."
            )

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        policies: Any = self.policies
        entries = {str(name): trainings_of(entry)[0] for name, entry in policies.items()}
        name, acting = next(iter(entries.items()))
        wrappers = wrappers_for(acting, self._cfg)
        env: Any
        env, policy = self._built(acting, wrappers)
        others = {other: self._built(entry, wrappers)[1] for other, entry in list(entries.items())[1:]}
        env_seed, agent_seed = self._chosen_seeds(acting, wrappers)
        try:
            env = with_frames(env)
            env.seed(env_seed)
            for agent in (policy, *others.values()):
                agent.seed(agent_seed)
            episode = inspected_episode(
                env, policy, others, _actor_critic(acting, policy), self._gamma(acting), self.deterministic
            )
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(env, f"environment in the episode seeded with {env_seed}"), "reset or step")
        finally:
            env.close()
        page = write_trajectory_page(
            episode.record,
            EPISODE_FILE,
            title=f"{name}, seed {env_seed}",
            decisions=episode.decisions,
            every_k_states=self.every_k_states,
        )
        print(f"The episode is in {page.absolute()}; open it in a browser.", flush=True)
        if self.video is not None:
            film = write_video(episode.record, Path(self.video), self.frames_per_second)
            print(f"Its film is {film.absolute()}.", flush=True)

    def _chosen_seeds(self, acting: Mapping[str, Any], wrappers: Any) -> tuple[int, int]:
        """Seeds of the environment and of the agent in the episode that is shown."""
        seeds = self.maze_seeding.episode_seeds(self.n_episodes)
        if len(seeds) == 1:
            return seeds[0]
        maze_env, policy = self._built(acting, wrappers)
        env: Any = LogStatsWrapper.wrap(maze_env)
        try:
            with Progress(len(seeds), "Episodes to choose from") as progress:
                measures = played_measures(env, policy, seeds, self.deterministic, progress.update)
        finally:
            env.close()
        ranked = sorted(range(len(seeds)), key=lambda episode: measures[episode][RETURN])
        chosen = ranked[_CHOICES[self.choose](len(ranked))]
        print(f"The {self.choose} of {len(seeds)} episodes has a return of {measures[chosen][RETURN]:.6g}.", flush=True)
        return seeds[chosen]

    def _built(self, entry: Mapping[str, Any], wrappers: Any) -> tuple[Any, Any]:
        return env_and_policy(self._cfg, entry, wrappers, self.max_episode_steps)

    def _gamma(self, entry: Mapping[str, Any]) -> float:
        return float(self.gamma if self.gamma is not None else entry.get("gamma") or 0.99)


def _actor_critic(entry: Mapping[str, Any], policy: Any) -> TorchActorCritic | None:
    """The policy with the critic that was trained with it; `None`: there is none that values states."""
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_state_critic import TorchStateCritic
    from maze.core.utils.checkpoint import load_state
    from maze.perception.models.model_composer import BaseModelComposer

    config, directory = entry["policy"], entry.get("input_dir")
    if not directory or not isinstance(config, Mapping) or not hasattr(policy, "spaces"):
        return None
    try:
        composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]
            config["model"], config_path="model", **vars(policy.spaces)
        )
        if composer.policy is None or not isinstance(composer.critic, TorchStateCritic):
            return None
        actor_critic = TorchActorCritic(composer.policy, composer.critic, policy.device)
        actor_critic.load_state_dict(load_state(Path(str(directory)) / str(config["state_dict_file"])))
        actor_critic.eval()
    except MazeError:
        return None
    return actor_critic
