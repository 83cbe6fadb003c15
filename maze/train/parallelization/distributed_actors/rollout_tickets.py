"""Who may collect how many rollouts ahead of the learner, and which finished one it takes next."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable


class RolloutTickets:
    """Bounds how old a rollout can be when the learner uses it.

    A rollout is collected on a ticket. Its age is the number of updates since the ticket was issued, which the number
    of updates that its policy has missed cannot exceed. All tickets together are the rollouts in progress, one for
    each actor, and those that may wait (the queue). When the learner takes a rollout, its actor gets a new ticket.

    Finished rollouts are taken as they come, unless that would leave too little room for older ones: then the learner
    waits for those.

    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_size: Number of finished rollouts that may wait.
    """

    def __init__(self, n_actors: int, batch_size: int, queue_size: int) -> None:
        self.n_actors = n_actors
        self.batch_size = batch_size
        self._queue_size = queue_size
        self.max_age = math.ceil((queue_size + n_actors) / batch_size)
        """No rollout is older than this when it is taken."""
        self.version = 0
        """Number of updates so far."""
        shares, rest = divmod(queue_size, n_actors)
        self._issued = [deque([0] * (1 + shares + (actor < rest))) for actor in range(n_actors)]
        self._n_taken = 0

    def add_actor(self) -> None:
        """One more actor collects from now on: a rollout is in progress, as many may wait as before."""
        self.n_actors += 1
        self.max_age = math.ceil((self._queue_size + self.n_actors) / self.batch_size)
        self._issued.append(deque([self.version]))

    def n_issued(self, actor: int) -> int:
        """Number of rollouts that an actor has to collect, or has collected and are waiting."""
        return len(self._issued[actor])

    def next_of(self, waiting: Iterable[int]) -> int | None:
        """The actor whose oldest finished rollout to take next; `None`: wait for others.

        :param waiting: Actors with finished rollouts, those first that finished first.
        """
        candidates = list(waiting)
        if not candidates:
            return None
        latest = self._latest_version()
        # of equally old ones the first that finished
        best = min(candidates, key=lambda actor: self._issued[actor][0])
        return best if self._issued[best][0] <= latest else None

    def take(self, actor: int) -> int:
        """Takes the oldest rollout of an actor into the current batch, and issues it a new ticket.

        :return: The version at which the old ticket was issued.
        """
        version = self._issued[actor].popleft()
        self._issued[actor].append(self.version)
        self._n_taken += 1
        return version

    def batch_done(self) -> None:
        """The current batch is complete."""
        self._n_taken = 0

    def updated(self) -> None:
        """The learner has made an update: later tickets are younger."""
        self.version += 1

    def _latest_version(self) -> int:
        """Issue version of the youngest rollout that can be taken without one of the older ones getting too old."""
        by_version = Counter(version for issued in self._issued for version in issued)
        n_older = 0
        for version in sorted(by_version):
            n_older += by_version[version]
            updates_left = version + self.max_age - self.version
            room = self.batch_size - self._n_taken + updates_left * self.batch_size
            if n_older >= room:
                return version
        return self.version
