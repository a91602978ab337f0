"""Generate AGENTS.md and the site's llms.txt from pages that people read.

In: CONTRIBUTING.md, docs/explanation/internals.md, the navigation of mkdocs.yml with the first sentence of each page.
Out: `agents()`, the text of AGENTS.md, which `python docs/agents.py` writes; `llms()`, the text of llms.txt
(https://llmstxt.org), which `docs/site.py` adds.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def agents() -> str:
    """Text of AGENTS.md: how to check a change, where things are, which files are generated, the house rules."""
    return "\n\n".join(
        [
            "# For coding agents",
            "Written by `python docs/agents.py` from CONTRIBUTING.md and docs/explanation/internals.md: change those.",
            "lockstep trains transformers on any number of processes with the same bits. A result that is wrong in\n"
            "silence is the worst defect there is: prefer a refusal, before any process starts, that names the key\n"
            "and what to do.",
            "## How to check",
            _block("CONTRIBUTING.md", "Setting up and checking", "```sh", "```\n") + "```",
            "One test: `.venv/bin/python -m pytest tests/launchers/test_local.py -k NAME`. Set `OMP_NUM_THREADS=1`. A\n"
            "change to numerics needs a control that fails without it.",
            "## Where things are",
            _block("docs/explanation/internals.md", "Packages", "| in `", "\n\n"),
            "## Files that commands write",
            _section("CONTRIBUTING.md", "Files that commands write"),
            "## House rules",
            _section("CONTRIBUTING.md", "House rules") + "\n",
        ]
    )


def llms(address: str = "") -> str:
    """Text of llms.txt: every page of the navigation, with its first sentence. `address`: of the site, ending with a
    slash."""
    lines: list[str] = []
    for line in (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].splitlines():
        entry = line.strip().removeprefix("- ")
        page = ROOT / "docs" / entry
        if entry.endswith(":"):
            lines += ["", f"## {entry[:-1]}", ""] if line.startswith("  - ") else []
        elif entry.endswith(".md") and page.exists():
            title, sentence = _first_words(page.read_text(encoding="utf-8"))
            lines.append(f"- [{title}]({address}{entry.removesuffix('.md')}.html){': ' if sentence else ''}{sentence}")
    return "\n".join(
        [
            "# lockstep",
            "",
            "> Distributed training of transformers that gives the same weights, bit for bit, on one process or many;",
            "> `lockstep verify` and `lockstep trace` find training that is wrong in silence.",
            *lines,
            "",
        ]
    )


def _first_words(text: str) -> tuple[str, str]:
    """Title of a page, and the first sentence of its first paragraph, without links."""
    title = text.partition("\n")[0].removeprefix("# ")
    blocks = re.split(r"\n\n+", re.sub(r"^<!--.*?-->$|^```.*?^```$", "", text, flags=re.M | re.S))[1:]
    prose = next((block for block in blocks if re.match(r"[\w`*\[]", block)), "")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return title, re.split(r"(?<=[.:]) (?=[A-Z`])", plain)[0]


def _section(page: str, title: str) -> str:
    """Text below a heading, with links relative to the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    body = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip()
    home = posixpath.dirname(page)
    return LINK.sub(lambda link: posixpath.normpath(posixpath.join(home, link[1])), body)


def _block(page: str, title: str, begin: str, end: str) -> str:
    """Part of a section between two markers."""
    rest = begin + (_section(page, title) + "\n\n").partition(begin)[2]
    return rest[: rest.index(end, len(begin))].strip() + ("\n" if begin.startswith("```") else "")


if __name__ == "__main__":
    (ROOT / "AGENTS.md").write_text(agents(), encoding="utf-8")
