"""The pages of the site, in build/pages: `make site` runs this, zensical, which reads mkdocs.yml, and docs/publish.py.

In: the repository. Out: the pages of docs/, README, CONTRIBUTING, CHANGELOG, the log and the museum's list as pages,
the run files in runs/ as one page, the list of all messages (docs/messages.py) and a page with a section for each,
which docs/publish.py splits, options of every command (docs/options.py), what each key changes
(tests/support/key_table.py), tables of other systems' keys (docs/tables.py), and llms.txt; source and results that
pages link to become files under repository/, as they are. Links are changed to suit the site, and the code of a
message becomes a link to its entry. A link to what does not exist is left alone: `zensical build --strict` fails.
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.extend(str(path) for path in Path(__file__).parents[1].glob("packages/*/src"))
sys.path.append(str(Path(__file__).parents[1] / "src"))
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from agents import llms
from messages import CODE as MESSAGE_CODE
from messages import CODE_PAGES, KEY_PAGE, MESSAGES, code_pages, messages, read
from options import page as options
from tables import fill

from support import key_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "promise.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/log.md": "project/log.md",
    "benchmarks/results/museum.md": "reference/museum-exhibits.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
BADGE = re.compile(r"^\[!\[.*\]\(https://.*\)\]\(.*\)\n", re.M)  # nothing is loaded from elsewhere
# A picture with a form for dark pages, as GitHub reads it. The theme wants two images.
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>')
# GitHub wants a backslash before a bar in the code of a table's cell, and shows none. Here it would be shown.
ROW = re.compile(r"^\|.*$", re.M)
# Who reads a page needs not know what the test of its commands needs.
COMMENT = re.compile(r"^<!--.*?-->\n", re.M | re.S)
# Pages that only the site has. In the repository, pages name them without a link.
GENERATED = {"What each key changes": KEY_PAGE, "Options of every command": "reference/options.md"}
NAMED = re.compile(r'[Tt]he site\'s page "(' + "|".join(GENERATED) + r')"')


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs", out, ignore=shutil.ignore_patterns("*.py", "__pycache__", "theme", "codes", "texts.yaml")
    )
    homes = {page: f"docs/{page}" for page in (path.relative_to(out).as_posix() for path in out.rglob("*.md"))}
    homes |= {page: home for home, page in PAGES.items()}
    copied: set[str] = set()
    for page, home in homes.items():
        text = (ROOT / home).read_text(encoding="utf-8")
        text, places = _moved(fill(without_start(text) if home == "README.md" else text), home, page)
        copied |= places
        _write(out / page, text)
    _write(out / "reference/runs.md", _run_files())
    _write(out / MESSAGES, messages())
    _write(out / KEY_PAGE, key_table.page())
    _write(out / "reference/options.md", options())
    _write(out / CODE_PAGES / "index.md", code_pages())
    for place in sorted(copied):
        _write(out / f"repository/{place}.txt", (ROOT / place).read_text(encoding="utf-8"))
    _write(out / "llms.txt", llms())


def without_start(readme: str) -> str:
    """Remove from README what the site's home says too: its beginning and the list of pages at its end."""
    return "# What it promises\n\n" + readme[readme.index("## What it does\n") : readme.index("## Where next\n")]


def _moved(text: str, home: str, page: str) -> tuple[str, set[str]]:
    """The text of a page with links that suit the site, and the files of the repository that it links to."""
    places: set[str] = set()

    def moved(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(home), link[1]))
        anchor = link[2] or ""
        if place in PAGES:
            target = PAGES[place]
        elif place == "runs" or place.startswith("runs/"):
            target = "reference/runs.md"
            anchor = f"#{_anchor(place if (ROOT / place).is_file() else 'run files')}"
        elif place.startswith("docs/"):
            target = place.removeprefix("docs/")
        elif (ROOT / place).is_file():
            places.add(place)
            target, anchor = f"repository/{place}.txt", ""
        else:
            return link[0]
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + anchor

    text = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", COMMENT.sub("", BADGE.sub("", text)))
    text = NAMED.sub(
        lambda name: f"[{name[1]}]({posixpath.relpath(GENERATED[name[1]], posixpath.dirname(page))})", text
    )
    text = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)
    parts = CODE.split(text)
    codes, index = {message.code for message in read()}, posixpath.relpath(MESSAGES, posixpath.dirname(page) or ".")

    def linked(code: re.Match[str]) -> str:
        return f"[{code[0]}]({index}#{code[0].lower()})" if code[0] in codes else code[0]

    return "".join(
        part if at % 2 else MESSAGE_CODE.sub(linked, LINK.sub(moved, part)) for at, part in enumerate(parts)
    ), places


def _anchor(place: str) -> str:
    return re.sub(r"[^\w -]", "", place.lower()).replace(" ", "-")


def _run_files() -> str:
    parts = ["# Run files\n\nSave an example and give its path to `lockstep train`. A clone has them in runs/.\n"]
    paths = [path for path in (ROOT / "runs").rglob("*") if path.suffix in (".yaml", ".py")]
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8").strip()
        parts.append(f"## {name}\n\n```{path.suffix[1:]}\n{text}\n```\n")
    return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(ROOT / "build/pages")
