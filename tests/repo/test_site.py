"""The site has a page for each message code, and versions. Zensical is not run; the tests write its pages by hand."""

import json
import posixpath
import re
from pathlib import Path

import pytest

from lockstep_trace.coded import VERBOSE, coded, with_addresses
from support.documents import script
from support.places import ROOT

messages = script("messages")
publish = script("publish")
site = script("site")

SHELL = """<!doctype html>
<html><head><meta name="description" content="lockstep"><title>Messages by code - lockstep</title></head><body>
<a href="../../../how-to/install.html" class="md-tabs__link">
  How-to
</a>
<nav class="md-nav md-nav--primary md-nav--lifted"><label>lockstep</label><ul class="md-nav__list">
<li>every page <nav class="md-nav"><ul><li>of the site</li></ul></nav></li></ul></nav>
<article class="md-content__inner"><h1>Messages by code</h1>
{}</article>
<footer><nav class="md-footer__inner">next</nav>Made with</footer></body></html>
"""
SECTION = """<h2 id="{0}">{1}<a class="headerlink" href="#{0}">&para;</a></h2>
<div><pre><span></span><code>no "key" &lt;key&gt;
</code></pre></div>
<p>What to do: write it.</p>
<p>Raised in <code>a.py</code>: It reads.</p>
"""
CODES = ("LS1000", "LS1001", "LS2031")


def built(folder: Path) -> Path:
    """Write the files that zensical writes for three messages."""
    (folder / "reference/messages/all").mkdir(parents=True)
    sections = "".join(SECTION.format(code.lower(), code) for code in CODES)
    (folder / "reference/messages/all/index.html").write_text(SHELL.format(sections))
    (folder / "reference/messages.html").write_text(sections.replace("h2", "h3"))
    (folder / "index.html").write_text("home")
    places = [
        *("index.html", "reference/messages.html", "reference/messages/all/index.html"),
        *(f"reference/messages{page}.html#{code.lower()}" for page in ("", "/all/index") for code in CODES),
    ]
    text = "<pre>no key</pre> <p>What to do</p> <p>Raised in <code>a.py</code></p> rank"
    items = [{"location": place, "level": 3, "title": place, "text": text, "path": []} for place in places]
    (folder / "search.json").write_text(json.dumps({"config": {}, "items": items}))
    return folder


def test_each_code_has_its_own_page(tmp_path: Path) -> None:
    html = built(tmp_path / "html")
    publish.write_code_pages(html, CODES)
    page = (html / "reference/messages/LS1001/index.html").read_text()
    assert "<title>LS1001 - lockstep</title>" in page
    assert re.findall(r"<h1[^>]*>(\w+)", page) == ["LS1001"]
    assert 'content="no &quot;key&quot; &lt;key&gt;"' in page
    assert "What to do: write it." in page
    assert re.findall(r'href="([^"#]+)(?:#\w+)?"', page) == [
        "../../../how-to/install.html",  # the tabs
        "../../../how-to/install.html",  # the menu, which has no other page of the site
        "../../messages.html",
        "../LS1000/index.html",
        "../LS2031/index.html",
        "../../messages.html",
    ]
    assert not (html / "reference/messages/all").exists()
    index = (html / "reference/messages.html").read_text()
    assert index.count("<h3") == 3
    assert '<h3 id="ls2031"><a href="messages/LS2031/index.html">LS2031</a>' in index, "old anchors stay"


def test_the_search_has_each_code_once(tmp_path: Path) -> None:
    html = built(tmp_path / "html")
    publish.write_code_pages(html, CODES)
    items = json.loads((html / "search.json").read_text())["items"]
    pages = [f"reference/messages/{code}/index.html" for code in CODES]
    assert [item["location"] for item in items] == ["index.html", "reference/messages.html", *pages]
    assert items[-1]["text"].strip() == "<pre>no key</pre> <p>What to do</p>"


def test_pages_that_zensical_writes_otherwise_are_refused(tmp_path: Path) -> None:
    html = built(tmp_path / "html")
    with pytest.raises(SystemExit, match=r"3 sections .* 4 codes"):
        publish.write_code_pages(html, [*CODES, "LS9000"])


def test_the_newest_version_is_latest(tmp_path: Path) -> None:
    """This holds whatever was built last; a release that corrects another one replaces its folder."""
    site = tmp_path / "site"
    for release in ("0.2.0", "0.10.0", "0.2.1"):
        built(tmp_path / "html")
        (tmp_path / "html/index.html").write_text(release)
        publish.add_version(tmp_path / "html", site, release)
    assert json.loads((site / "versions.json").read_text()) == [
        {"version": "0.10", "title": "0.10.0", "aliases": ["latest"]},
        {"version": "0.2", "title": "0.2.1", "aliases": []},
    ]
    homes = {folder: (site / folder / "index.html").read_text() for folder in ("0.2", "0.10", "latest")}
    assert homes == {"0.2": "0.2.1", "0.10": "0.10.0", "latest": "0.10.0"}
    root = (site / "index.html").read_text()
    assert "url=latest/index.html" in root
    assert (site / "latest/index.html").exists()
    assert "provider: mike, default: latest" in (ROOT / "mkdocs.yml").read_text()


def test_versions_without_a_folder_are_removed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    publish.add_version(built(tmp_path / "html"), site, "0.3.0")
    (site / "0.3").rename(tmp_path / "gone")
    publish.add_version(built(tmp_path / "html"), site, "0.2.0")
    assert json.loads((site / "versions.json").read_text()) == [
        {"version": "0.2", "title": "0.2.0", "aliases": ["latest"]}
    ]


def test_a_code_page_has_the_remedy_keys_and_words() -> None:
    text = messages.code_pages()
    sections = dict(re.findall(r"^## (LS\d{4})\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(sections) == [message.code for message in messages.read()]
    assert "**Fix.** Take the key that the message suggests" in sections["LS1000"]
    assert "What to do: indent by spaces" in messages.remedies(messages.REFERENCE)["LS1106"]
    assert "Raised in `src/lockstep/config/" in sections["LS1000"]
    assert "[the run file](../../run-file.md#track)" in sections["LS0500"]
    links = set(re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text))
    places = [posixpath.normpath(posixpath.join("docs", messages.CODE_PAGES, link)) for link in links]
    assert len(places) > 5
    written = {f"docs/{messages.MESSAGES}", f"docs/{messages.KEY_PAGE}"}  # by docs/site.py
    assert [place for place in places if not (ROOT / place).exists() and place not in written] == []


def test_most_frequent_codes_are_explained() -> None:
    """Each has a reason, an example and a fix, in 40 to 90 words, because longer texts are not read."""
    codes = {message.code for message in messages.read()}
    explained = messages.explained()
    assert len(explained) >= 80
    assert explained.keys() - codes == set()
    assert {code for code, parts in explained.items() if list(parts) != ["why", "example", "fix"]} == set()
    words = {code: len(" ".join(parts.values()).split()) for code, parts in explained.items()}
    assert {code: count for code, count in words.items() if not 40 <= count <= 90} == {}


def test_the_site_lists_every_message_and_links_each_code_to_its_entry(tmp_path: Path) -> None:
    site.main(tmp_path / "pages")
    entries = (tmp_path / "pages/reference/messages.md").read_text()
    assert re.findall(r"^### (LS\d{4})$", entries, re.M) == [
        message.code for message in sorted(messages.read(), key=lambda message: (message.code[2], message.code))
    ]
    page = (tmp_path / "pages/how-to/troubleshooting.md").read_text()
    assert "| an unknown key | [LS1000](../reference/messages.md#ls1000) |" in page
    assert "## Healthy scripts" in (tmp_path / "pages/reference/museum-exhibits.md").read_text()
    assert "| `seed` | " in (tmp_path / "pages/reference/run-file-keys.md").read_text()
    assert "| `num_train_epochs` | `epochs` |" in (tmp_path / "pages/reference/coming-from/trainer.md").read_text()
    text, _ = site._moved("LS1000 `LS1000` LS9999", "docs/index.md", "index.md")
    assert text == "[LS1000](reference/messages.md#ls1000) `LS1000` LS9999", "no link in code or to a code that is gone"


def test_a_clone_prints_the_entry_of_a_code() -> None:
    assert messages.entries(["LS1000"]).startswith("### LS1000\n")
    with pytest.raises(SystemExit, match="no message has the code LS9999"):
        messages.entries(["LS9999"])


def test_keys_and_words_are_those_that_the_message_names() -> None:
    keys = {"data.source", "steps", "optim.lr"}
    assert messages.keys_of("steps: set data.source, not <x> in other.key or mydata.source", keys) == [
        "steps",
        "data.source",
    ]
    assert messages.keys_of("more steps than data", keys) == []
    words = {"rank": "", "local rank": "", "step": ""}
    assert messages.words_of("Ranks 1 and 2 stopped", words) == ["rank"]
    assert messages.words_of("the local rank", words) == ["local rank"]
    assert messages.words_of("step.py, ranking", words) == []


def test_verbose_prints_the_address_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = coded("LS1000", "no such key")
    monkeypatch.delenv(VERBOSE, raising=False)
    assert with_addresses(text) == text
    monkeypatch.setenv(VERBOSE, "1")
    assert with_addresses(text) == (
        "no such key [LS1000]\n  LS1000: see reference/messages/LS1000/ on the site; "
        "in a clone run: python docs/messages.py LS1000"
    )
