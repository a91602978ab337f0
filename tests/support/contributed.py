"""The examples of CONTRIBUTING.md as modules of a user's own."""

from support.places import ROOT

_PAGE = ROOT / "CONTRIBUTING.md"


def example(file: str) -> str:
    """The source that the page says to save as this file of `src/lockstep/`."""
    found = _PAGE.read_text().partition(f"Save this as `src/lockstep/{file}`")[2]
    code = found.partition("```python\n")[2].partition("\n```")[0] + "\n"
    assert code.startswith('"""'), f"CONTRIBUTING.md has no {file}"
    return code
