"""Documentation pages with their generated tables, for comparison with the source.

In: paths below docs/. Out: `chapters`, several pages as one text with a section per page.
"""

import re
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from support.places import ROOT

DOCS = ROOT / "docs"


def chapters(*names: str) -> str:
    """Concatenate pages, or all pages of a folder; their titles become sections ("## ")."""
    paths = [path for name in names for path in (sorted((DOCS / name).glob("*.md")) or [DOCS / name])]
    fill = script("tables").fill
    return "\n".join(re.sub(r"\A# ", "\n## ", fill(path.read_text(encoding="utf-8"))) for path in paths)


def script(name: str) -> ModuleType:
    """Import a script of docs/ as a module."""
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
