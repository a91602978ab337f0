"""What of a run is compared with a plain computation: the section `verify` of the run file."""

from __future__ import annotations

from pydantic import Field

from lockstep.config.sections import Section


class VerifySection(Section):
    plain: bool = Field(
        True,
        description="before the first step compare loss and gradient of a few examples with a plain computation by "
        "transformers and torch, and at the end a few answers of the export with those of the run; stop where they "
        "differ by more than rounding",
    )
