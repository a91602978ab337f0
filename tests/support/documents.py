"""Pages of the documents with the tables that the site fills in, for tests that compare them with the source.

In: paths below docs/. Out: `chapters`, the text of several pages as one, in which the title of each is a section.
"""

import re
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from support.places import ROOT

DOCS = ROOT / "docs"


def chapters(*names: str) -> str:
    """The pages, or all pages of a folder, one after another; their titles are sections ("## ")."""
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
