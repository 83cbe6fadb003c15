"""The table at the end of a sweep."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from maze.cli.sweeps.trials import TrialResult, ranked
from maze.core.utils.files import write_whole

RESULTS_FILE = "results.csv"
OPTIMUM_FILE = "optimization_results.yaml"
MAX_CELL, MAX_ERROR = 28, 60


def write_results(directory: Path, results: Sequence[TrialResult], maximize: bool) -> None:
    """Writes `results.csv`: one line per trial, best first."""
    keys = _keys(results)
    text = io.StringIO(newline="")
    table = csv.writer(text)
    columns = ("seeds", "objective", "objective_std", "violation", "duration", "status", "error", "run_dir")
    table.writerow(["trial", *keys, *columns])
    for result in ranked(results, maximize):
        table.writerow(
            [
                result.trial,
                *(_unquoted(result.params.get(key, "")) for key in keys),
                " ".join(map(str, result.seeds)),
                _exact(result.objective),
                _exact(result.objective_std),
                _exact(result.violation),
                "" if result.duration is None else f"{result.duration:.3f}",
                result.status,
                result.error,
                " ".join(result.run_dirs),
            ]
        )
    write_whole(directory / RESULTS_FILE, text.getvalue())


def write_optimum(directory: Path, name: str, results: Sequence[TrialResult], maximize: bool) -> None:
    """Writes the best values found so far, in the form that Hydra's search plugins use."""
    from omegaconf import OmegaConf

    best = ranked(results, maximize)[0]
    if best.objective is None:
        return
    values = {key: _typed(text) for key, text in best.params.items()}
    optimum = {"name": name, "best_evaluated_params": values, "best_evaluated_result": best.objective}
    if best.violation is not None:
        optimum["best_evaluated_violation"] = best.violation
    write_whole(directory / OPTIMUM_FILE, OmegaConf.to_yaml(OmegaConf.create(optimum)))


def results_table(results: Sequence[TrialResult], maximize: bool, n_rows: int = 50) -> str:
    """The same for the console.

    :param n_rows: Further trials are only counted.
    """
    keys = _keys(results)
    names = _short_names(keys)
    has_constraints = any(result.violation is not None for result in results)
    header = ["trial", *names, "objective", *(["violation"] if has_constraints else []), "duration", "status", "run"]
    rows = [_row(result, keys, has_constraints) for result in ranked(results, maximize)]
    left_out = len(rows) - n_rows
    rows = rows[:n_rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    width = shutil.get_terminal_size((160, 24)).columns
    lines = [" | ".join(f"{cell:>{size}}" for cell, size in zip(line, widths, strict=True)) for line in (header, *rows)]
    lines.insert(1, "-+-".join("-" * size for size in widths))
    lines = [line if len(line) <= max(width, 80) else line[: max(width, 80) - 1] + "…" for line in lines]
    if left_out > 0:
        lines.append(f"... and {left_out} more in {RESULTS_FILE}")
    return "\n".join(lines)


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def broken_text(violation: float | None) -> str:
    return f" (constraints are broken by {violation:.5g})" if violation else ""


def _row(result: TrialResult, keys: Sequence[str], has_constraints: bool) -> list[str]:
    spread = "" if result.objective_std is None else f" ± {result.objective_std:.3g}"
    return [
        str(result.trial),
        *(_cut(_unquoted(result.params.get(key, "")), MAX_CELL) for key in keys),
        number_text(result.objective) + spread,
        *([number_text(result.violation)] if has_constraints else []),
        "-" if result.duration is None else f"{result.duration:.1f} s",
        result.status + (f": {_cut(result.error.splitlines()[0], MAX_ERROR)}" if result.error else ""),
        " ".join(result.run_dirs),
    ]


def _keys(results: Sequence[TrialResult]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result.params))


def _short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each path, where that is enough to tell them apart."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def _unquoted(text: str) -> str:
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else re.sub(r"\\(.)", r"\1", text)


def _typed(text: str) -> int | float | str:
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
    if not is_number:
        return _unquoted(text)
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _exact(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
