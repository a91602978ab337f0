"""The example plug-ins of examples/plug_ins, and the distribution of docs/how-to/plug-ins/distribution.md."""

from pathlib import Path

from support.places import ROOT

_EXAMPLES = ROOT / "examples/plug_ins"


def example(file: str) -> str:
    """Source of an example, by the file of `src/lockstep/` that its page says to copy it to."""
    return (_EXAMPLES / Path(file).name).read_text()


def distribution(folder: Path) -> Path:
    """Write the distribution `lockstep-gossip` into a folder."""
    package = folder / "lockstep-gossip/src/lockstep_gossip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("gossip.py", "weights.py"):
        (package / name).write_text((_EXAMPLES / name).read_text())
    page = (ROOT / "docs/how-to/plug-ins/distribution.md").read_text()
    project = page.partition("```toml\n")[2].partition("```")[0]
    (folder / "lockstep-gossip/pyproject.toml").write_text(project)
    return folder / "lockstep-gossip"
