"""Services and counters shared by all parts of an environment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from maze.core.events.event_service import EventService


class EnvironmentContext:
    """Step counter, episode identity, event service and callbacks of one environment.

    The core environment creates it; all wrappers of the core environment have it as `env.context`.
    """

    def __init__(self) -> None:
        self.event_service = EventService()
        self.step_id = 0
        """Environment steps completed in the current episode."""
        self.n_substeps = 0
        """Sub-steps that the simulation has taken in all episodes."""
        self.n_episodes = 0
        """Episodes begun so far; never reset."""
        self.is_step_complete = False
        """Whether the last sub-step completed an environment step; its events are dropped when the next one begins."""
        self.is_episode_over = False
        """Whether the episode has ended; only a reset may follow."""
        self.step_actor_id: Any = None
        """The actor that started the current environment step, if the environment has several."""
        self.is_replaying = False
        """Whether episodes of an earlier run are played again to restore its state."""

        self._seed: Any = None
        self._episode_count = 0
        self._episode_id: str | None = None
        self._episode = self._begun = object()
        self._post_step_callbacks: list[Callable[[], Any]] = []
        self._are_callbacks_deferred = False

    @property
    def episode_id(self) -> str:
        """Identify the current episode.

        Derived from the environment's seed and the number of episodes since it was seeded; without a seed it is
        random.
        """
        if self._episode_id is None:
            if self._seed is None:
                self._seed = os.urandom(16).hex()
            name = f"{self._seed}/{self._episode_count}".encode()
            digest = hashlib.blake2b(name, digest_size=16).hexdigest()
            self._episode_id = "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:]))
        return self._episode_id

    @property
    def is_copied(self) -> bool:
        """Whether another environment has begun the current episode (`clone_from`, a replay); recordings leave it out.

        An environment that takes its own episode back from a copy resumes recording it.
        """
        return self.is_replaying or self._episode is not self._begun

    def set_seed(self, seed: Any) -> None:
        """Derive the identities of the next episodes from `seed` and their number.

        :param seed: An object whose `str` identifies it; `None`: random identities.
        """
        if self._episode_count:
            # The current episode keeps its identity: the next reset completes its records.
            self._episode_id = self.episode_id
        self._seed = seed
        self._episode_count = 0

    def pre_step(self) -> None:
        """Begin a sub-step: drop the events of the previous environment step if it is complete."""
        if self.is_step_complete:
            self.is_step_complete = False
            self.event_service.clear_events()

    @contextmanager
    def events_dropped(self) -> Iterator[None]:
        """Return a context whose events are dropped, such as those of a policy whose actions are not taken."""
        self.pre_step()
        records = self.event_service.records
        n_events = len(records)
        yield
        del records[n_events:]

    def increment_env_step(self) -> None:
        """Count the current environment step as completed; at most once per sub-step."""
        if not self.is_step_complete:
            self.is_step_complete = True
            self.step_id += 1

    def reset_env_episode(self) -> None:
        """Begin a new episode. Events fired afterwards belong to its first step."""
        self.step_id = 0
        self.is_step_complete = False
        self.is_episode_over = False
        self.step_actor_id = None
        self._episode_id = None
        self._episode = self._begun = object()
        self._episode_count += 1
        self.n_episodes += 1
        self.event_service.clear_events()

    def register_post_step(self, callback: Callable[[], Any]) -> None:
        """Call a function after every further (sub-)step.

        :param callback: Function without arguments, whose exceptions `step` raises. :meth:`clone_from` does not take it
            over.
        """
        self._post_step_callbacks.append(callback)

    def run_post_step_callbacks(self) -> None:
        """Call the registered callbacks, unless they are deferred to the end of an outer wrapper's step."""
        if self._post_step_callbacks and not self._are_callbacks_deferred:
            for callback in self._post_step_callbacks:
                callback()

    @contextmanager
    def deferred_post_step_callbacks(self) -> Iterator[None]:
        """Defer callbacks; they run once when the outermost block ends without an error."""
        if self._are_callbacks_deferred:
            yield
            return
        self._are_callbacks_deferred = True
        try:
            yield
        finally:
            self._are_callbacks_deferred = False
        self.run_post_step_callbacks()

    def clone_from(self, context: EnvironmentContext) -> None:
        """Take over the counters, the identity of the current episode and the events of its current step.

        Later episodes keep their own identities; callbacks are not taken over.

        :param context: Context of the other environment, which is not modified.
        """
        self.event_service.clone_from(context.event_service)
        self.n_episodes += 1  # the current episode is replaced by another one
        self.step_id = context.step_id
        self.is_step_complete = context.is_step_complete
        self.is_episode_over = context.is_episode_over
        self.step_actor_id = context.step_actor_id
        self._episode_id, self._episode = context.episode_id, context._episode
