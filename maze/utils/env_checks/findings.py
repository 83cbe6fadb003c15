"""What a check of an environment found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One fault."""

    check: str
    """Kind of fault, such as `observation-space`."""
    place: str
    """Environment, sub-step and key."""
    found: str
    """What is wrong: expected and found."""
    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"[{self.check}] {self.place}: {self.found} {self.fix}"


@dataclass
class CheckReport:
    """All findings on an environment, and what could not be checked."""

    env_name: str
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Checks that were not possible, with their reasons."""
    n_steps: int = 0
    """Sub-steps taken."""

    def add(self, check: str, where: str, found: str, fix: str) -> None:
        """Adds a finding; one of each kind and place is enough.

        :param check: Kind of fault.
        :param where: Place within the environment; may be empty.
        :param found: What was expected and found.
        :param fix: What to do.
        """
        place = f"{self.env_name}, {where}" if where else self.env_name
        if all((finding.check, finding.place) != (check, place) for finding in self.findings):
            self.findings.append(Finding(check, place, found, fix))

    def skip(self, what: str, why: str) -> None:
        """Notes that something was not checked."""
        note = f"{what}: {why}"
        if note not in self.skipped:
            self.skipped.append(note)

    def __str__(self) -> str:
        lines = [f"{self.env_name}: {len(self.findings)} finding(s) in {self.n_steps} sub-steps."]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  (not checked) {note}" for note in self.skipped]
        return "\n".join(lines)
