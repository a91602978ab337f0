"""How often weights and optimizer state are hashed while a run trains: the section `fingerprint` of the run file."""

from __future__ import annotations

from pydantic import Field

from lockstep.config.sections import Interval, Section


class FingerprintSection(Section):
    every: Interval = Field(
        100,
        description="steps between hashes of weights and optimizer state in OUTPUT/fingerprints.jsonl, or epoch; "
        "checkpoints have one anyway; 0: only these",
    )
