"""List the slow tests: those whose cases take more than a quarter of a second on average.

    python tests/slow_tests.py durations.txt > tests/slow_tests.txt

The file is the output of `pytest -vv --durations=0`.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LIMIT_S = 0.25
_LINE = re.compile(r"^([\d.]+)s (setup|call|teardown) +(\S+?::\w+(?:::\w+)*)(\[.*)?$", re.MULTILINE)


def slow_tests(text: str) -> list[str]:
    """Return the names of the slow tests, without parameters.

    :param text: Output of pytest with all durations.
    """
    seconds: dict[str, float] = defaultdict(float)
    cases: dict[str, set[str]] = defaultdict(set)
    for duration, _, test, parameters in _LINE.findall(text):
        seconds[test] += float(duration)
        cases[test].add(parameters)
    return sorted(test for test, total in seconds.items() if total > LIMIT_S * len(cases[test]))


if __name__ == "__main__":
    print("\n".join(slow_tests(Path(sys.argv[1]).read_text("utf-8"))))
