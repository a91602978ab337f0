"""The site as it is served, in build/site: `make site` runs this after zensical.

In: build/html, which zensical wrote from docs/site.py's pages. Out: build/site/VERSION/, with a page for each message
code; build/site/latest/, a copy of the newest version; versions.json, which the theme's choice of versions reads (the
format is that of mike); index.html, which leads to latest/. Versions that are in build/site already stay: a site of
several versions is made by `make site` in a checkout of each. Without a folder a version goes from the choice.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from messages import CODE_PAGES, read

ROOT = Path(__file__).resolve().parents[1]
INDEX, PAGES = "reference/messages.html", "reference/messages/"
LATEST = "latest"
ARTICLE = re.compile(r"(<article[^>]*>)(.*)(</article>)", re.S)
SECTION = re.compile(r'(?=<h2 id="ls\d{4}">)')
HEADING = re.compile(r'<h(\d) id="(ls\d{4})">(LS\d{4})(?=<a class="headerlink")')
MESSAGE = re.compile(r"<pre>.*?<code>(.*?)</code>", re.S)
# What is shown beside a page: the whole site is most of its bytes, and a code's page needs the parts of the site alone.
MENU = re.compile(r'(<nav class="md-nav md-nav--primary[^>]*>.*?<ul[^>]*>)(.*)(</ul>\s*</nav>)', re.S)
# No menu stands beside the text: without a width its lines are as long as the window.
ARTICLE_HEAD = (
    '<article class="md-content__inner md-typeset" style="max-width: 45rem"><a id="__skip" tabindex="-1"></a>'
)
TABS = re.compile(r'<a href="([^"]+)" class="md-tabs__link">\s*([\w-]+)\s*</a>')
WRAPPED = '<pre style="white-space: pre-wrap">'  # a message is one long line
FOOTER = re.compile(r'<nav class="md-footer__inner.*?</nav>\s*', re.S)
REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>lockstep</title>
<meta http-equiv="refresh" content="1; url={to}">
<script>location.replace("{to}" + location.search + location.hash)</script>
<a href="{to}">{to}</a>
</html>
"""


def main(built: Path, site: Path, release: str) -> None:
    write_code_pages(built, {message.code for message in read()})
    add_version(built, site, release)


def write_code_pages(built: Path, codes: Collection[str]) -> None:
    """Split the page of all sections into reference/messages/CODE/index.html, and adapt the index and the search."""
    whole = built / CODE_PAGES / "index.html"
    text = whole.read_text(encoding="utf-8")
    article = _parts(ARTICLE, text)
    sections = {_parts(HEADING, section)[3]: section for section in SECTION.split(article[2])[1:]}
    _compare(codes, sections, "sections of the page of all messages")
    before, after = _shell(text[: article.start(1)]) + ARTICLE_HEAD, FOOTER.sub("", text[article.end(2) :])
    order = list(sections)
    for at, (code, section) in enumerate(sections.items()):
        beside = [(f"../{near}/index.html", near) for near in order[max(at - 1, 0) : at + 2] if near != code]
        beside += [(f"../../messages.html#{code.lower()}", "all messages")]
        links = " · ".join(f'<a href="{to}">{name}</a>' for to, name in beside)
        message = html.escape(" ".join(html.unescape(_parts(MESSAGE, section)[1]).split()), quote=True)
        page = re.sub(r"<title>.*?</title>", f"<title>{code} - lockstep</title>", before, count=1, flags=re.S)
        page = re.sub(r'(<meta name="description" content=")[^"]*', lambda m: m[1] + message, page, count=1)  # noqa: B023
        page = page.replace("Messages by code", code)
        body = section.replace("<h2 ", "<h1 ", 1).replace("</h2>", "</h1>", 1).rstrip()
        body = body.replace("<pre>", WRAPPED, 1)
        folder = built / PAGES / code
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(f"{page}\n{body}\n<p>{links}</p>\n{after}", encoding="utf-8")
    shutil.rmtree(whole.parent)
    index = built / INDEX
    entries = index.read_text(encoding="utf-8")
    _compare(codes, {heading[3] for heading in HEADING.finditer(entries)}, "entries of the index")
    linked = HEADING.sub(r'<h\1 id="\2"><a href="messages/\3/index.html">\3</a>', entries).replace("<pre>", WRAPPED)
    index.write_text(linked, encoding="utf-8")
    search = built / "search.json"
    found = json.loads(search.read_text(encoding="utf-8"))
    found["items"] = search_items(found["items"])
    places = {item["location"].split("/")[-2] for item in found["items"] if item["location"].startswith(PAGES)}
    _compare(codes, places, "pages in the search")
    search.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def search_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the search finds: of a code its page, once, by its message and what to do."""
    kept = []
    for item in items:
        page, _, anchor = item["location"].partition("#")
        if page == f"{CODE_PAGES}/index.html":
            if not re.fullmatch(r"ls\d{4}", anchor):
                continue
            words = item["text"].partition("<p>Raised in <code>")[0]
            place = f"{PAGES}{anchor.upper()}/index.html"
            item = {**item, "location": place, "level": 1, "text": words, "path": ["Reference", "Messages"]}
        elif page == INDEX and re.fullmatch(r"ls\d{4}", anchor):
            continue
        kept.append(item)
    return kept


def add_version(built: Path, site: Path, release: str) -> None:
    """Move what was built into its version's folder, and lead to the newest version."""
    version = ".".join(release.split(".")[:2])  # corrections do not change what is explained
    file = site / "versions.json"
    versions = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    shutil.rmtree(site / version, ignore_errors=True)
    site.mkdir(parents=True, exist_ok=True)
    built.rename(site / version)
    versions = [{"version": version, "title": release}, *(v for v in versions if v["version"] != version)]
    versions = [v for v in versions if (site / v["version"]).is_dir()]
    versions.sort(key=lambda v: [int(part) for part in v["version"].split(".")], reverse=True)
    newest = versions[0]["version"]
    entries = [{**v, "aliases": [LATEST] if v["version"] == newest else []} for v in versions]
    file.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(site / LATEST, ignore_errors=True)
    shutil.copytree(site / newest, site / LATEST)
    (site / "index.html").write_text(REDIRECT.format(to=f"{LATEST}/index.html"), encoding="utf-8")


def _shell(before: str) -> str:
    """The head of a page with the site's parts for a menu."""
    entry = '<li class="md-nav__item"><a href="{}" class="md-nav__link"><span class="md-ellipsis">{}</span></a></li>'
    entries = [entry.format(*tab) for tab in [*TABS.findall(before), ("../../messages.html", "All messages")]]
    menu = _parts(MENU, before)
    return before[: menu.end(1)] + "\n".join(entries) + before[menu.start(3) :]


def _compare(codes: Collection[str], there: Collection[str], what: str) -> None:
    if sorted(codes) != sorted(there):
        sys.exit(f"docs/publish.py: {len(there)} {what}, and {len(codes)} codes; zensical may write other HTML now")


def _parts(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.search(text)
    if found is None:
        sys.exit(f"docs/publish.py: zensical's page has no {pattern.pattern}")
    return found


if __name__ == "__main__":
    source = (ROOT / "src/lockstep/_version.py").read_text(encoding="utf-8")
    main(ROOT / "build/html", ROOT / "build/site", _parts(re.compile(r'__version__ = "(.+)"'), source)[1])
    print("build/site/index.html")
