"""The Dockerfile, without an engine: the tests read its instructions, and follow those that they can in a folder."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lockstep.config.run import load
from lockstep_clouds.kubernetes import Kubernetes
from lockstep_clouds.kubernetes_manifests import pod
from support.places import ROOT

DOCKERFILE = ROOT / "docker/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def given(name: str) -> list[str]:
    return [words for instruction, words in instructions() if instruction == name]


def test_dockerfile_has_known_instructions_only() -> None:
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known
    assert [name for name, _ in instructions()].index("FROM") == 1  # after the argument it uses


def test_arguments_are_declared_before_they_are_used() -> None:
    declared: set[str] = set()
    for name, words in instructions():
        if name == "FROM":
            assert set(re.findall(r"\$\{(\w+)", words)) <= declared
            declared.clear()  # arguments from before FROM do not reach beyond it
        elif name == "ARG":
            declared.add(words.partition("=")[0])
        else:
            assert set(re.findall(r"\$\{(\w+)", words)) <= declared, words


def test_extras_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = next(words for words in given("ARG") if words.startswith("EXTRAS=")).partition("=")[2].split(",")
    for extra in extras:
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra


def test_copied_files_exist_and_are_not_ignored() -> None:
    let_through = {line[1:] for line in (ROOT / "docker/Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    for words in given("COPY"):
        *sources, _ = shlex.split(words)
        for source in sources:
            assert (ROOT / source).exists()
            assert source in let_through


@pytest.mark.processes
@pytest.mark.parametrize(("index", "expected"), [("", []), ("https://index.example/cpu", ["--index-url"])])
def test_the_index_of_torch_is_an_argument(index: str, expected: list[str]) -> None:
    command = next(words for words in given("RUN") if "TORCH" in words).replace("python -m pip", "printf '%s\\n'")
    done = subprocess.run(
        ["sh", "-c", command], env={"TORCH": "torch==2.13.0", "TORCH_INDEX": index}, capture_output=True, text=True
    )
    words = done.stdout.split()
    assert words == ["install", "--no-cache-dir", *expected, *([index] if index else []), "torch==2.13.0"]


def test_container_user_equals_that_of_the_pods() -> None:
    launch = {"name": "kubernetes", "image": "i", "pvc": "c", "processes": 1}
    run = load(None, [], {"data": {"source": "a/b"}, "model": {"source": "c/d"}, "launch": launch})
    context = pod(run, Kubernetes.options(run.launch), "lockstep")["securityContext"]
    assert given("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert any("--uid 1000" in words for words in given("RUN"))


def test_signals_reach_python() -> None:
    """The list form of the instruction starts no shell in between."""
    (entry,) = given("ENTRYPOINT")
    assert entry == '["python", "-m", "lockstep"]'


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_copied_files_suffice_to_install(tmp_path: Path) -> None:
    """The package builds from the files that COPY brings alone, including its non-code files."""
    pytest.importorskip("setuptools")
    for words in given("COPY"):
        *sources, target = shlex.split(words)
        for source in sources:
            to = tmp_path / "image" / target / ("" if source in ("src", "packages") else source)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, to)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--target", str(tmp_path / "installed"), str(tmp_path / "image")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ours = {p.relative_to(ROOT / "src") for p in (ROOT / "src/lockstep").rglob("*") if p.is_file()}
    there = {p.relative_to(tmp_path / "installed") for p in (tmp_path / "installed/lockstep").rglob("*")}
    assert {p for p in ours if "__pycache__" not in p.parts} <= there


def test_the_lock_is_what_pyproject_allows_and_names_no_place() -> None:
    """.ci/constraints.txt has one version of every required package, without a URL."""
    lines = [line for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines), "no addresses, paths or local versions"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        asked = Requirement(text)
        if asked.name.startswith("lockstep-"):  # of this repository
            continue
        assert asked.specifier.contains(pins[canonicalize_name(asked.name)]), text
    assert not [name for name in pins if name.startswith(("nvidia-", "triton"))], "which torch is not for a lock to say"


def test_no_release_of_lightning_that_was_withdrawn() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [text for text in project["optional-dependencies"]["bench"] if text.startswith("lightning")]
    for withdrawn in ("2.6.2", "2.6.3"):
        assert not Requirement(asked).specifier.contains(withdrawn)
