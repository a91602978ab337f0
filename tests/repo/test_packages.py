"""The distributions of this repository have one version, extras that install them, and valid entry points."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import io
import re
import shutil
import sys
import tomllib
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import lockstep_trace
from lockstep import commands
from lockstep._version import __version__
from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.track.report.report import templates
from lockstep_trace import report
from lockstep_trace.coded import TraceError
from support.places import ROOT

GROUND = "lockstep-trace"  # what lockstep-train stands on
PAGE = "lockstep-trace-report"  # of a trace; lockstep-train has it, lockstep-trace by its extra
FOLDERS = {path.name: path for path in sorted((ROOT / "packages").iterdir())}
PACKAGES = {name: path for name, path in FOLDERS.items() if name not in (GROUND, PAGE)}


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_distributions_share_one_version_and_require_it() -> None:
    core = project(ROOT)
    assert core["version"] == __version__
    assert {f"{GROUND}=={__version__}", f"{PAGE}=={__version__}"} < set(core["dependencies"])
    assert project(FOLDERS[GROUND])["optional-dependencies"] == {"report": [f"{PAGE}=={__version__}"]}
    assert lockstep_trace.__version__ == __version__
    for name, folder in FOLDERS.items():
        found = project(folder)
        assert (found["name"], found["version"]) == (name, __version__)
        wanted = {Requirement(text).name for text in found["dependencies"]}
        needs = {GROUND: {"torch", "numpy"}, PAGE: {GROUND, "jinja2"}}
        assert wanted == needs.get(name, {"lockstep-train"})
        assert name not in PACKAGES or found["dependencies"] == [f"lockstep-train=={__version__}"]
        assert found["requires-python"] == core["requires-python"]
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    asked = [Requirement(text) for each in core["optional-dependencies"].values() for text in each]
    ours = [each for each in asked if each.name in PACKAGES]
    assert {each.name for each in ours} == set(PACKAGES)
    assert {str(each.specifier) for each in ours} == {f"=={__version__}"}
    for each in ours:
        assert each.extras <= project(PACKAGES[each.name]).get("optional-dependencies", {}).keys()


def test_the_tracer_is_installed_in_seconds() -> None:
    """Its wheel has less than 300,000 bytes: here as zip packs its files, with a record of them. The wheel's metadata
    adds some 400."""
    folder, packed = FOLDERS[GROUND], io.BytesIO()
    paths = [path for path in (folder / "src" / "lockstep_trace").rglob("*") if path.is_file()]
    paths = [path for path in paths if path.suffix != ".pyc"] + [
        folder / name for name in ("LICENSE", "README.md", "pyproject.toml")
    ]
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in paths:
            wheel.write(path, path.relative_to(folder))
        rows = [(path.relative_to(folder), hashlib.sha256(path.read_bytes()).digest()) for path in paths]
        wheel.writestr("RECORD", "\n".join(f"{path},{base64.b64encode(each).decode()}" for path, each in rows))
    assert len(packed.getvalue()) < 299_620


def test_the_page_of_a_trace_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lockstep_trace_report", None)
    with pytest.raises(TraceError, match=r'pip install "lockstep-trace\[report\]"'):
        report.write(Path())
    with pytest.raises(RunError, match="pip install -e packages/lockstep-trace-report"):
        templates.__wrapped__()  # of a run's page: a clone that was updated, but not installed again


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `.ci/release` on copies of the files that it writes."""
    loader = SourceFileLoader("release_command", str(ROOT / ".ci/release"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    command = module_from_spec(spec)
    loader.exec_module(command)

    def copied(path: Path) -> Path:
        to = tmp_path / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(path, to))

    for name in ("PROJECTS", "MODULES"):
        monkeypatch.setattr(command, name, [copied(path) for path in getattr(command, name)])
    monkeypatch.setattr(command, "CHANGELOG", tmp_path / "CHANGELOG.md")
    return command


def test_a_release_has_its_version_everywhere(release: Any, tmp_path: Path) -> None:
    title = "# Changelog\n\n## [1.2.3rc4] - "
    release.CHANGELOG.write_text(f"{title}Unreleased\n\nNews.\n\n## [1.2.2] - 2020-01-01\n\nOld.\n")
    release.write("1.2.3rc4", "2021-02-03")
    assert release.CHANGELOG.read_text() == f"{title}2021-02-03\n\nNews.\n\n## [1.2.2] - 2020-01-01\n\nOld.\n"
    folders = [tmp_path, *(tmp_path / "packages" / name for name in FOLDERS)]
    for each in map(project, folders):
        assert each["version"] == "1.2.3rc4"
        lists = [each["dependencies"], *each.get("optional-dependencies", {}).values()]
        ours = [Requirement(text) for texts in lists for text in texts if text.startswith("lockstep-")]
        assert {str(requirement.specifier) for requirement in ours} <= {"==1.2.3rc4"}
        assert ours
    for module in release.MODULES:
        assert '\n__version__ = "1.2.3rc4"' in module.read_text()
        assert __version__ not in module.read_text()


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("## [1.2.2] - Unreleased\n\nNews.\n", "expected the heading '## [1.2.3] - Unreleased'"),
        ("## [1.2.3] - Unreleased\n\n## [1.2.2] - 2020-01-01\n\nOld.\n", "and what is new below it"),
        ("## [1.2.3] - Unreleased\n\n[1.2.3]: https://example.org\n", "and what is new below it"),
        ("## [1.2.3] - 2020-01-01\n\nNews.\n", "1.2.3 was released on 2020-01-01"),
    ],
)
def test_a_release_without_news_writes_nothing(release: Any, changelog: str, message: str) -> None:
    release.CHANGELOG.write_text(changelog)
    files = [*release.PROJECTS, *release.MODULES]
    before = [path.read_bytes() for path in files]
    with pytest.raises(SystemExit) as caught:
        release.write("1.2.3", "2021-02-03")
    assert message in str(caught.value)
    assert [path.read_bytes() for path in files] == before


def test_the_changelog_has_a_heading_that_a_release_finds(release: Any) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pattern = rf"^## \[{re.escape(__version__)}\] - (Unreleased|\d{{4}}-\d\d-\d\d)$"
    heading = re.search(pattern, changelog, re.MULTILINE)
    assert heading is not None
    if heading[1] == "Unreleased":
        assert f"## [{__version__}] - 2021-02-03\n" in release.dated(changelog, __version__, "2021-02-03")


def test_an_extra_installs_the_distribution_of_its_name() -> None:
    extras = project(ROOT)["optional-dependencies"]
    for name in PACKAGES:
        assert extras[name.removeprefix("lockstep-")] == [f"{name}=={__version__}"]
    ours = [each for each in [*project(ROOT)["dependencies"], *extras["dev"]] if each.startswith("lockstep-")]
    assert ours == [f"{GROUND}=={__version__}", f"{PAGE}=={__version__}"]


@pytest.mark.parametrize("name", PACKAGES)
def test_entry_points_are_what_pyproject_says_and_can_be_loaded(name: str) -> None:
    written = project(PACKAGES[name])["entry-points"]
    installed = {(e.group, e.name, e.value) for e in importlib.metadata.distribution(name).entry_points}
    assert installed == {(group, each, value) for group, of in written.items() for each, value in of.items()}, (
        f"pip install --no-deps -e packages/{name}"
    )
    for kind, group in plugins.GROUPS.items():
        for each in written.get(group, {}):
            if kind == "commands":
                assert plugins.load_entry(plugins.entries(kind)[each][0], "command")
            else:
                assert plugins.find(kind, each).plugin == kind  # type: ignore[attr-defined]
                assert each not in plugins.built_in(kind)


def test_missing_plug_ins_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that a distribution of this repository provides has a line in `EXTRAS`."""
    for name, folder in PACKAGES.items():
        for kind, group in plugins.GROUPS.items():
            if kind != "commands":
                for each in project(folder)["entry-points"].get(group, {}):
                    assert plugins.EXTRAS[kind][each] == name.removeprefix("lockstep-")
            elif each := project(folder)["entry-points"].get(group, {}):
                for command in each:
                    assert name.removeprefix("lockstep-") in plugins.EXTRAS[f"lockstep {command}"].values()
    monkeypatch.setattr(plugins, "entries", lambda kind: {})
    with pytest.raises(plugins.PluginError) as caught:
        plugins.find("launchers", "kubernetes")
    assert str(caught.value).startswith('kubernetes needs lockstep-clouds: pip install "lockstep-train[clouds]"')


def test_estimator_script_is_refused_with_the_package_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entries", lambda kind: {})
    text = "from sagemaker.pytorch import PyTorch\nPyTorch(role=1)"
    with pytest.raises(RunError) as caught:
        import_config.script(Script(Path("launch.py"), text))
    assert 'sagemaker needs lockstep-clouds: pip install "lockstep-train[clouds]"' in str(caught.value)


@pytest.mark.parametrize("option", ["plan --simulate", "plan --suggest", "plan --processes=8", "bench --calibrate"])
def test_an_option_that_is_not_installed_says_what_installs_it(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "entries", lambda kind: {})
    assert main(option.split()) == 2
    needs = f'lockstep {option.partition("=")[0]} needs lockstep-plan: pip install "lockstep-train[plan]"'
    assert capsys.readouterr().err.startswith(f"lockstep: {needs}")


def test_every_option_that_is_added_is_known_where_it_is_not_installed() -> None:
    for command in ("plan", "bench"):
        parser = argparse.ArgumentParser(add_help=False)
        getattr(commands.modules_of(command)[0], f"{command}_arguments")(parser)
        assert set(parser._option_string_actions) == plugins.EXTRAS[f"lockstep {command}"].keys()
