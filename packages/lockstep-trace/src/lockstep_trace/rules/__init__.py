"""Rules that find a fault in one trace; one file per kind of evidence. A finding: the evidence, the likely fault and
its certainty."""

from __future__ import annotations

from dataclasses import dataclass, replace

WRONG, SUSPICIOUS, INFO = "wrong", "suspicious", "info"
LEVELS = (WRONG, SUSPICIOUS, INFO)
PATIENCE = 3  # steps in which a condition must hold before it is a finding


@dataclass(frozen=True)
class Finding:
    """A detected fault. `code`: its kind. `what`: the evidence, with step, rank and names. `cause`: the likely fault
    and its fix. `level`: `wrong` (a contradiction that no correct program has), `suspicious`, or `info`. `otherwise`:
    other explanations; `decides`: how to decide between them; both are empty for level `wrong`. `likely`: the default
    output also shows it if suspicious."""

    code: str
    what: str
    cause: str
    step: int | None = None
    level: str = SUSPICIOUS
    otherwise: str = ""
    decides: str = ""
    likely: bool = False


def weakened(finding: Finding, proved: bool, otherwise: str, decides: str, likely: bool = False) -> Finding:
    """Return the finding as `wrong` if proved, else as `suspicious` with other explanations and how to decide."""
    if proved:
        return replace(finding, level=WRONG)
    return replace(finding, level=SUSPICIOUS, otherwise=otherwise, decides=decides, likely=likely)
