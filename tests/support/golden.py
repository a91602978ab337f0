"""Texts that are compared with what is written down in tests/golden; LOCKSTEP_GOLDEN=1 writes them down anew."""

import os

from support.places import TESTS

FOLDER = TESTS / "golden"


def compare(name: str, text: str) -> None:
    """`text` is what the file of this name holds."""
    if os.environ.get("LOCKSTEP_GOLDEN"):
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text)
    assert text == (FOLDER / name).read_text(), f"differs from tests/golden/{name}; LOCKSTEP_GOLDEN=1 writes it anew"
