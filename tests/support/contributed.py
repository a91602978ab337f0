"""The examples of CONTRIBUTING.md as modules of a user's own."""

from pathlib import Path

from support.places import ROOT

_PAGE = ROOT / "CONTRIBUTING.md"


def example(file: str) -> str:
    """The source that the page says to save as this file of `src/lockstep/`."""
    code = _block(f"src/lockstep/{file}")
    assert code.startswith('"""'), f"CONTRIBUTING.md has no {file}"
    return code


def distribution(folder: Path) -> Path:
    """The distribution `lockstep-gossip`, written into a folder."""
    package = folder / "lockstep-gossip/src/lockstep_gossip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gossip.py").write_text(example("strategies/gossip.py"))
    (package / "weights.py").write_text(_block("lockstep-gossip/src/lockstep_gossip/weights.py"))
    (folder / "lockstep-gossip/pyproject.toml").write_text(_block("lockstep-gossip/pyproject.toml"))
    return folder / "lockstep-gossip"


def _block(file: str) -> str:
    found = _PAGE.read_text().partition(f"Save this as `{file}`")[2]
    return found.partition("```")[2].partition("\n")[2].partition("\n```")[0] + "\n"
