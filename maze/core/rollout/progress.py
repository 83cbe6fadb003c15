"""How far a long piece of work has come: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Counts units of work.

    :param total: Number of units.
    :param description: What the work is.
    :param unit: Name of one unit.
    :param n_lines: Number of lines where there is no terminal.
    """

    def __init__(self, total: int, description: str, unit: str = "episodes", n_lines: int = 5) -> None:
        self.total = total
        self.description = description
        self.unit = unit
        self.n_done = 0
        self._line_after = max(1, -(-total // n_lines))
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=description, unit=f" {unit}", leave=False)

    def update(self) -> None:
        """One more unit is done."""
        self.n_done += 1
        if self._bar is not None:
            self._bar.update(1)
        elif self.n_done % self._line_after == 0 or self.n_done == self.total:
            rate = self.n_done / max(time.monotonic() - self._start, 1e-9)
            remaining = (self.total - self.n_done) / rate
            print(
                f"{self.description}: {self.n_done}/{self.total} {self.unit}, {rate:.3g}/s, {remaining:.0f} s left",
                flush=True,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
