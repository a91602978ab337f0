"""`lockstep` without a command, and `lockstep --completion`: a first visit, and Tab."""

import subprocess

import pytest

from lockstep import commands
from lockstep.cli import main
from lockstep.config import plugins
from support.messages import mentions

TAB = """
source {script}
complete_with=$(complete -p lockstep | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$complete_with lockstep "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
echo "${{COMPREPLY[@]}}"
"""


def test_a_first_visit_has_five_commands_and_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().out
    assert said.count("  lockstep ") == 5
    words = said.split()
    assert [name for name in commands.HELP if name not in words] == []
    assert len(said.splitlines()) <= 25
    assert max(map(len, said.splitlines())) < 80


def test_a_shell_that_there_is_no_script_for(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["tcsh"], []):
        assert main(["--completion", *words]) == 2
        assert mentions(capsys.readouterr().err, "LS8430", "bash, zsh, fish")


def test_completion_names_the_extra_if_shtab_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "lacking", list)
    assert main(["--completion", "bash"]) == 2
    assert "pip install 'lockstep-train[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in commands.HELP if name not in script] == []
    assert "--simulate" in script or "simulate" in script


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("lockstep pl", ["plan"]),
        ("lockstep plan --s", ["--simulate", "--suggest"]),
        ("lockstep --com", ["--completion"]),
    ],
)
def test_tab_in_bash(
    words: str, wanted: list[str], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["--completion", "bash"]) == 0
    script = tmp_path_factory.mktemp("bash") / "lockstep"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(["bash", "-c", TAB.format(script=script, words=words)], capture_output=True, text=True)
    assert done.stdout.split() == wanted, done.stderr
