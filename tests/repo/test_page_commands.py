"""Every code block of every page is parsed, its keys are checked, and it is run, unless the page says why not."""

from pathlib import Path

import pytest

from support import page_commands
from support.page_commands import PAGES, Block, blocks, levels_of, modules_of, problems, same, unmarked
from support.places import ROOT

MARKS = {"quick": [pytest.mark.processes], "slow": [pytest.mark.processes, pytest.mark.slow]}
MARKS["long"] = [pytest.mark.processes, pytest.mark.long]
RUN = [
    pytest.param(
        page,
        level,
        id=f"{page.relative_to(ROOT)}-{level}",
        marks=[*MARKS[level], pytest.mark.timeout(3600), *([pytest.mark.extras] if modules_of(page) else [])],
    )
    for page in PAGES
    for level in levels_of(page)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_keys_and_files_that_a_page_names_are_there(page: Path) -> None:
    found = {block.where: problems(block) for block in blocks(page)}
    assert {where: texts for where, texts in found.items() if texts} == {}


def test_every_documented_command_is_run_or_has_a_reason_not_to() -> None:
    assert [where for page in PAGES for where in unmarked(page)] == []


@pytest.mark.parametrize(("page", "level"), RUN)
def test_the_commands_of_a_page_print_its_outputs(page: Path, level: str, tmp_path: Path, cache: Path) -> None:
    for module in modules_of(page):
        pytest.importorskip(module)
    page_commands.run(page, tmp_path, cache, level)


@pytest.mark.parametrize(
    ("language", "code", "wrong"),
    [
        ("sh", "lockstep trian run.yaml", "no command 'trian'"),
        ("sh", "lockstep train run.yaml optim.learnin_rate=1", "did you mean"),
        ("sh", "lockstep plan run.yaml --simulte", "unknown"),
        ("sh", "cat a | lockstep bench --steps many", "many"),
        ("sh", "torchrun --nproc-per-node 2 -m lockstep verify run.yaml strategy.name=3", ""),
        ("sh", "pip install 'lockstep-train[notthere]'", "notthere"),
        ("sh", "make nothing", "nothing"),
        ("sh", "python benchmarks/nothing.py", "nothing"),
        ("yaml", "batch_size: many", "batch_size"),
        ("python", "def f(:", "invalid syntax"),
    ],
)
def test_a_mistake_in_a_block_is_found(language: str, code: str, wrong: str) -> None:
    texts = problems(Block(ROOT / "README.md", 1, language, code, "", (0, 0)))
    assert texts
    assert wrong in texts[0]


def test_recorded_outputs_may_differ_in_numbers_only() -> None:
    printed = "found 10/20 loss 1.25\nspeed 12.1 examples/s\nweights /tmp/a\nend\n"
    assert same("found 1/20 loss 0.5\n...\nend", printed)
    assert same("found 1/20 loss 3\nspeed 1 examples/s\nweights ./b\nend", printed)
    assert not same("found 1/20 loss 0.5\nend", printed)
    assert not same("found 1/20 accuracy 0.5\n...\nend", printed)
