"""Pages of the documents, for tests that compare them with the source.

In: paths below docs/. Out: `chapters`, the text of several pages as one, in which the title of each is a section.
"""

import re

from support.places import ROOT

DOCS = ROOT / "docs"


def chapters(*names: str) -> str:
    """The pages, or all pages of a folder, one after another; their titles are sections ("## ")."""
    paths = [path for name in names for path in (sorted((DOCS / name).glob("*.md")) or [DOCS / name])]
    return "\n".join(re.sub(r"\A# ", "\n## ", path.read_text(encoding="utf-8")) for path in paths)
