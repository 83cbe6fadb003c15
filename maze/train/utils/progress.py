"""How far a training is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm


class TrainingProgress:
    """Shows epochs and updates with the rate of environment steps and the remaining time.

    :param n_epochs: Number of epochs of the training; 0 if unknown.
    :param epoch_length: Number of updates per epoch.
    :param steps_per_update: Number of environment steps per update; 0: updates take none.
    """

    def __init__(self, n_epochs: int, epoch_length: int, steps_per_update: int) -> None:
        self.n_epochs = n_epochs
        self.epoch_length = epoch_length
        self.steps_per_update = steps_per_update
        self._epoch_start = time.perf_counter()
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=n_epochs * epoch_length or None,
                unit=" steps" if steps_per_update else " updates",
                unit_scale=steps_per_update or 1,
                dynamic_ncols=True,
                leave=False,
            )

    def start_epoch(self, epoch: int) -> None:
        """Announces an epoch, counted from 0 in this training."""
        self._epoch_start = time.perf_counter()
        if self._bar is not None:
            self._bar.set_description(f"epoch {epoch + 1}{f'/{self.n_epochs}' if self.n_epochs else ''}", refresh=False)

    def announce(self, work: str) -> None:
        """Prints what is being done from now on; the first line that there is until an epoch has ended."""
        self.before_output()
        print(f"-> {work} ...", flush=True)

    def update_done(self) -> None:
        """Counts one update."""
        if self._bar is not None:
            self._bar.update()

    def before_output(self) -> None:
        """Makes room for lines printed by others."""
        if self._bar is not None:
            self._bar.clear()

    def epoch_done(self, epoch: int, n_done: int) -> float:
        """Prints the lines that end an epoch.

        :param epoch: Number of the epoch, counted from 1.
        :param n_done: Number of epochs completed in this training.
        :return: Seconds this one took.
        """
        seconds = time.perf_counter() - self._epoch_start
        n_steps, remaining = self.epoch_length * self.steps_per_update, self.n_epochs - n_done
        details = [f"{n_steps / seconds:,.0f} environment steps/s"] if n_steps else []
        details += [f"about {_duration(remaining * seconds)} left"] if remaining > 0 else []
        self.before_output()
        print(f"Time required for epoch: {seconds:.2f}s" + (f" ({', '.join(details)})" if details else ""))
        print(f"Update epoch - {epoch}", flush=True)
        return seconds

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
