"""The documents name every key of the run file, every command and every plug-in; the run files in runs/ load."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lockstep import commands
from lockstep.cli import main
from lockstep.config import error_messages as messages
from lockstep.config import plugins
from lockstep.config.run import Run, load
from support.documents import script
from support.places import ROOT

_ALL = messages._described(Run)
KEYS = [key for key in _ALL if not any(other.startswith(f"{key}.") for other in _ALL)]  # no sections


def test_every_key_is_documented() -> None:
    text = "".join((ROOT / f"docs/reference/{page}.md").read_text() for page in ("run-file", "tasks"))
    assert [key for key in KEYS if f"`{key}`" not in text] == []


def test_the_run_file_s_tables_have_the_defaults_of_the_source() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| .*? (?<!\\)\| `(.*?)` (?<!\\)\| ", (ROOT / "docs/reference/run-file.md").read_text(), re.M
    )
    source = {key: _ALL[key].get_default(call_default_factory=True) for key, _ in rows if key in _ALL}
    number = {key for key, default in source.items() if isinstance(default, float)}
    stated = {key: float(text) if key in number else yaml.safe_load(text) for key, text in rows if key in source}
    assert len(stated) > 100
    assert stated == source


@pytest.mark.parametrize("task", [name for name in plugins.names("tasks") if name != "classification"])
def test_every_key_of_every_task_is_documented(task: str) -> None:
    text = (ROOT / "docs/reference/tasks.md").read_text()
    page = text.partition(f"## `{task}`")[2].partition("\n## ")[0]
    shared = re.findall(r"^\| `task.*", text.partition("## Keys of several tasks")[2].partition("\n## ")[0], re.M)
    page += "\n".join(line for line in shared if f"`{task}`" in line.split(" | ")[1])
    fields = plugins.find("tasks", task).Options.model_fields  # type: ignore[attr-defined]
    rows = [f"| `task.{key}` |" for key in fields] + [str(field.description) for field in fields.values()]
    assert [row for row in rows if row not in page] == []


def test_every_optimizer_and_every_key_of_it_is_documented() -> None:
    page = (ROOT / "docs/reference/optimizers.md").read_text()
    for name in plugins.names("optimizers"):
        assert f"| `{name}` |" in page
        for key, field in plugins.find("optimizers", name).Options.model_fields.items():  # type: ignore[attr-defined]
            assert f"| `optim.{key}` |" in page
            assert str(field.description) in page, f"{name}: {key}"


def test_every_strategy_is_explained() -> None:
    text = (ROOT / "docs/reference/strategies.md").read_text()
    assert [name for name in plugins.names("strategies") if f"{name}.py" not in text] == []


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.yaml")), ids=lambda p: p.name)
def test_run_files_load_and_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(path, []).name
    status, said = main(["plan", str(path), "--offline"]), capsys.readouterr()
    if "no such file" in said.err:  # of local data that this checkout has not
        assert status == 2
    else:
        assert status == 0
        assert "processes" in said.out
        assert "length" in said.out


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/reference/commands.md").read_text()
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("COMMAND")[2]
    for name in commands.HELP:
        assert name in listed
        assert f"lockstep {name}" in text


DOCS = ROOT / "docs"


def _named() -> set[str]:
    return set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))


def test_every_page_is_in_the_site_s_navigation() -> None:
    """Otherwise `make site` refuses to build."""
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - _named() == set()


MOST_WORDS = 1500  # of a page that is read from top to bottom; reference is looked up


@pytest.mark.parametrize("folder", ["tutorials", "how-to", "explanation"])
def test_a_page_can_be_read_at_one_sitting(folder: str) -> None:
    long = {page.name: len(page.read_text().split()) for page in (DOCS / folder).rglob("*.md")}
    assert {name: words for name, words in long.items() if words > MOST_WORDS} == {}


def test_all_pages_together_have_at_most_60000_words() -> None:
    """To add words, remove as many. README counts, too."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 60_000


def test_readme_can_be_read_in_a_minute_or_two() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_pages_are_sorted_by_purpose() -> None:
    rooms = {"tutorials", "how-to", "reference", "explanation"}
    assert {page.relative_to(DOCS).parts[0] for page in DOCS.rglob("*.md")} <= {"index.md", *rooms}


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING", "AGENTS"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_and_every_named_test_is_there(page: Path) -> None:
    """`make site` also checks links, but later."""
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / link for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)]
    named = [ROOT / name for name in re.findall(r"(?<![\w/.])tests/[\w/]+\.\w+", text)]
    assert [str(path) for path in linked + named if not path.exists()] == []


def _agents() -> ModuleType:
    return script("agents")


def test_agents_md_is_generated_from_contributing() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert text == _agents().agents(), "python docs/agents.py writes it"
    assert len(text.split()) < 1500


def test_the_list_of_pages_has_every_page() -> None:
    listed = set(re.findall(r"\(([\w/-]+)\.html\)", _agents().llms()))
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - {"index"}
    assert pages - listed == set()
