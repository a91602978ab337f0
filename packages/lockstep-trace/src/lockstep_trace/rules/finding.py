"""A finding: what was seen, what is likely wrong, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

WRONG, SUSPICIOUS, INFO = "wrong", "suspicious", "info"
LEVELS = (WRONG, SUSPICIOUS, INFO)
PATIENCE = 3  # steps in which something is so before it is a finding


@dataclass(frozen=True)
class Finding:
    """`code`: of the kind. `what`: the evidence, with step, rank and names. `cause`: what is likely wrong and what to
    change. `level`: `wrong` (a contradiction that no right program has), `suspicious`, or `info`. `otherwise`: what
    else it could be, and `decides`: what would tell; both are empty where it is `wrong`."""

    code: str
    what: str
    cause: str
    step: int | None = None
    level: str = SUSPICIOUS
    otherwise: str = ""
    decides: str = ""


def weakened(finding: Finding, proved: bool, otherwise: str, decides: str) -> Finding:
    """The finding as `wrong` if it is proved, else as `suspicious` with what else it could be and what would tell."""
    if proved:
        return Finding(finding.code, finding.what, finding.cause, finding.step, WRONG)
    return Finding(finding.code, finding.what, finding.cause, finding.step, SUSPICIOUS, otherwise, decides)
