"""One of the museum's exhibits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exhibit:
    """`expected`: the code of a finding in the run alone, or a part of the cause that `diff` names (`|` between two
    that are right); it has to come first. `reference`: arguments of the right job on one process, where the fault shows
    beside one. `libraries`: versions that the fault is in, installed beside the environment; empty: those installed."""

    name: str
    symptom: str
    script: str
    arguments: str
    processes: int
    expected: str
    reference: str | None = None
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Healthy:
    """A script that no finding may be made of; `reference`: arguments beside which it has to be the same training.
    `libraries`: as of an exhibit."""

    script: str
    arguments: str
    processes: int = 1
    reference: str | None = None
    libraries: tuple[str, ...] = ()
