"""A hook of mkdocs: what the pages link to outside of docs/ becomes a part of the site.

README, CONTRIBUTING and CHANGELOG become pages, the run files in runs/ one page together. Source and results become
files under repository/, as they are; llms.txt lists the pages. In: the markdown of each page, with links that suit a
reader of the repository. Out: the same with links that suit the site. A link to what does not exist is left alone:
`mkdocs build --strict` fails.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from agents import llms

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
HOMES = {page: name for name, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "runs.md", content=_run_files()))
    linked = {
        _place(link[1], file.src_uri)
        for file in files.documentation_pages()
        for link in LINK.finditer(file.content_string)
    }
    for place in sorted(linked):
        if _copied(place):
            files.append(File.generated(config, f"repository/{place}.txt", abs_src_path=str(ROOT / place)))
    return files


BADGE = re.compile(r"^\[!\[.*\]\(https://img\..*\)\]\(.*\)\n", re.M)  # nothing is loaded from elsewhere
# A picture with a form for dark pages, as GitHub reads it. The theme wants two images.
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def moved(link: re.Match[str]) -> str:
        place, anchor = _place(link[1], page.file.src_uri), link[2] or ""
        if place in PAGES:
            target = PAGES[place]
        elif place == "runs" or place.startswith("runs/"):
            target, anchor = "runs.md", f"#{_anchor(place if (ROOT / place).is_file() else 'runs')}"
        elif _copied(place):
            target, anchor = f"repository/{place}.txt", ""
        else:
            target = posixpath.relpath(place, "docs")
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".") + anchor

    return LINK.sub(moved, PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", BADGE.sub("", markdown)))


def on_post_build(config: MkDocsConfig) -> None:
    (Path(config.site_dir) / "llms.txt").write_text(llms(config.site_url or ""), encoding="utf-8")


def _place(link: str, page: str) -> str:
    """Where in the repository a page's link leads."""
    home = posixpath.dirname(HOMES.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(home, link))


def _copied(place: str) -> bool:
    return place not in PAGES and not place.startswith(("docs/", "runs/", "..")) and (ROOT / place).is_file()


def _anchor(place: str) -> str:
    return re.sub(r"[^\w-]", "", place.lower())


def _run_files() -> str:
    parts = ["# Run files {#runs}\n\nEach is a commented example. Give its path to `lockstep train`.\n"]
    paths = [path for path in (ROOT / "runs").rglob("*") if path.suffix in (".yaml", ".py")]
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8").strip()
        parts.append(f"## {name} {{#{_anchor(name)}}}\n\n```{path.suffix[1:]}\n{text}\n```\n")
    return "\n".join(parts)
