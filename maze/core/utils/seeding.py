"""Random seeds of a run."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LARGEST_SEED = 2**31 - 1


def set_seeds_globally(seed: int, set_cudnn_determinism: bool, info_txt: str) -> None:
    """Seed the global generators of Python, NumPy and torch.

    Components of Maze have their own generators; the global ones are for user code.

    :param seed: The seed, within the range of NumPy's (32 bits).
    :param set_cudnn_determinism: Whether cuDNN uses deterministic algorithms, which may be slower.
    :param info_txt: Owner of the seeds, for the log.
    """
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the global generator is the point)
    torch.manual_seed(seed)
    if set_cudnn_determinism:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    logger.info("Global random seeds set to %d (%s).", seed, info_txt)


def seeded_generator(seed: int | None, device: str = "cpu") -> torch.Generator:
    """Make a random generator for an algorithm.

    :param seed: Its seed; `None`: sampled from torch's global generator.
    :param device: Device of the generator.
    """
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    return generator


class MazeSeeding:
    """Generator of the seeds of all environments and agents of a run.

    :param env_seed: Seed of the environments' seeds; None: random, see `env_global_seed`.
    :param agent_seed: Seed of the agents' seeds; None: random.
    :param cudnn_determinism_flag: Whether the run uses deterministic algorithms of cuDNN.
    """

    def __init__(self, env_seed: int | None, agent_seed: int | None, cudnn_determinism_flag: bool) -> None:
        self.env_global_seed = _checked(env_seed, "env_base_seed")
        """Seed of the environments' seeds."""
        self.agent_global_seed = _checked(agent_seed, "agent_base_seed")
        """Seed of the agents' seeds."""
        self.cudnn_determinism_flag = cudnn_determinism_flag
        """Whether the run uses deterministic algorithms of cuDNN."""
        self.env_rng = np.random.RandomState(self.env_global_seed)
        self.agent_rng = np.random.RandomState(self.agent_global_seed)

    @classmethod
    def configured(cls, seeding: Mapping[str, Any] | None) -> MazeSeeding:
        """Build the seeds from a run's section `seeding`.

        :param seeding: `env_base_seed`, `agent_base_seed` and `cudnn_determinism_flag`, all optional.
        """
        values = seeding or {}
        flag = bool(values.get("cudnn_determinism_flag"))
        return cls(values.get("env_base_seed"), values.get("agent_base_seed"), flag)

    @staticmethod
    def generate_seed_from_random_state(rng: np.random.RandomState) -> int:
        """Sample a positive seed of 31 bits, valid for every generator.

        :param rng: The generator, which is advanced.
        """
        return int(rng.randint(1, _LARGEST_SEED))

    def generate_env_instance_seed(self) -> int:
        """Return the next environment's seed."""
        return self.generate_seed_from_random_state(self.env_rng)

    def generate_agent_instance_seed(self) -> int:
        """Return the next agent's seed."""
        return self.generate_seed_from_random_state(self.agent_rng)

    def episode_seeds(self, n_episodes: int) -> list[tuple[int, int]]:
        """Return the next seeds of environment and agent; further calls return other seeds.

        :param n_episodes: Number of episodes.
        :return: A pair of seeds of environment and agent for each episode.
        """
        return [(self.generate_env_instance_seed(), self.generate_agent_instance_seed()) for _ in range(n_episodes)]


def _checked(seed: Any, name: str) -> int:
    if seed is None:
        return secrets.randbelow(_LARGEST_SEED - 1) + 1
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**32:
        raise ConfigError(f"seeding.{name} must be a whole number from 0 to 2**32 - 1, or null; found {seed!r}.")
    return int(seed)


def generator_state(rng: np.random.Generator) -> dict[str, int]:
    """Return the state of a generator as integers, for :func:`set_generator_state`.

    :param rng: A generator with the bit generator PCG-64, NumPy's default.
    """
    bits: Any = rng.bit_generator.state
    return {**bits["state"], "has_uint32": bits["has_uint32"], "uinteger": bits["uinteger"]}


def set_generator_state(rng: np.random.Generator, state: Mapping[str, int]) -> None:
    """Continue from a state of :func:`generator_state`.

    :param rng: A generator with the bit generator PCG-64, which is changed.
    :param state: The state.
    """
    words = {name: int(value) for name, value in state.items()}
    of_bits = {name: words.pop(name) for name in ("state", "inc")}
    rng.bit_generator.state = {"bit_generator": "PCG64", "state": of_bits, **words}
