"""`maze-run --export <run>`: export a trained policy as one file that acts without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maze.cli.errors import FlagParser, UsageError
from maze.cli.run_info import find_run
from maze.serve.bundle import PolicyBundle

FLAG = "--export"


def export_run(arguments: Sequence[str]) -> int:
    """Write the bundle of a run, and print its content and the code that is not included.

    :param arguments: Arguments of `--export`.
    :return: Exit status.
    :raises UsageError: There is no such run, or an option is unknown.
    """
    settings = _parsed(arguments)
    run = find_run(settings.pop("run"), FLAG)
    out = settings.pop("out", Path(f"{run.absolute().name}.maze"))
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: there is no directory {out.parent}.")
    bundle = PolicyBundle.from_run(run, **settings)
    path = bundle.save(out)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, SHA-256 {bundle.sha256}")
    for key, step in bundle.steps.items():
        observed = ", ".join(step.observation_space)
        heads = ", ".join(f"{name} ({head.description['distribution']})" for name, head in step.heads.items())
        print(f"  sub-step {key!r}: from {observed} to {heads}")
        if sizes := next(iter(step.networks.values())).state_sizes:
            states = ", ".join(f"{name} ({size})" for name, size in sizes.items())
            print(f"    recurrent state: {states}; sessions keep it")
    for piece in bundle.card["code"]:
        need = "must be provided" if piece["is_required"] else "may be provided" if piece["call"] else "precedes it"
        print(f"  not in the file: {piece['name']} ({piece['class']}) {need}")
    n_cases = sum(len(next(iter(case["logits"].values()))) for case in bundle.reference)
    print(f"Its logits equal those of the trained policy in {n_cases} recorded states.")
    return 0


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    parser = FlagParser(FLAG, "Write a trained policy as one file that acts without torch.")
    parser.add_argument("run", type=Path, help="directory of the training run")
    parser.add_argument("--out", type=Path, help="the file, <run>.maze by default")
    parser.add_argument("--name", help="name of the policy")
    parser.add_argument("--weights", dest="state_dict_file", help="file of the weights, state_dict.pt by default")
    parser.add_argument("--steps", dest="n_steps", type=int, help="number of steps recorded as reference cases")
    parser.add_argument("--seed", type=int, help="seed of these steps")
    return vars(parser.parse_intermixed_args(list(arguments)))
