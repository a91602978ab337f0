"""Texts compared with files in tests/golden; LOCKSTEP_GOLDEN=1 rewrites the files."""

import os

from support.places import TESTS

FOLDER = TESTS / "golden"


def compare(name: str, text: str) -> None:
    """Assert that `text` equals the file of this name."""
    if os.environ.get("LOCKSTEP_GOLDEN"):
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text)
    assert text == (FOLDER / name).read_text(), f"differs from tests/golden/{name}; LOCKSTEP_GOLDEN=1 writes it anew"
