"""The examples of docs/how-to/plug-ins as user modules."""

from pathlib import Path

from support.places import ROOT

_NAMES = ("strategy.md", "task.md", "optimizer.md", "launcher.md", "tracker.md", "distribution.md")
_PAGES = [ROOT / "docs/how-to/plug-ins" / name for name in _NAMES]


def example(file: str) -> str:
    """Source that the page says to save as this file of `src/lockstep/`."""
    code = _block(f"src/lockstep/{file}")
    assert code.startswith('"""'), f"no page of plug-ins has {file}"
    return code


def distribution(folder: Path) -> Path:
    """Write the distribution `lockstep-gossip` into a folder."""
    package = folder / "lockstep-gossip/src/lockstep_gossip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gossip.py").write_text(example("strategies/gossip.py"))
    (package / "weights.py").write_text(_block("lockstep-gossip/src/lockstep_gossip/weights.py"))
    (folder / "lockstep-gossip/pyproject.toml").write_text(_block("lockstep-gossip/pyproject.toml"))
    return folder / "lockstep-gossip"


def _block(file: str) -> str:
    found = "".join(page.read_text() for page in _PAGES).partition(f"Save this as `{file}`")[2]
    return found.partition("```")[2].partition("\n")[2].partition("\n```")[0] + "\n"
