"""The list of planted faults stays alive: each stands at one place of the source as it is, and is Python."""

import ast
import importlib.util
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[1]
SOURCE = Path(lockstep.__file__).parent

_spec = importlib.util.spec_from_file_location("mutations", ROOT / "benchmarks" / "mutations.py")
assert _spec is not None
assert _spec.loader is not None
mutations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutations)
FAULTS = mutations.faults()


def test_there_are_many_in_all_rooms_that_decide_results() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    rooms = {fault.file.partition("/")[0] for fault in FAULTS}
    assert rooms == {"checkpoint", "config", "data", "distributed", "strategies", "tasks", "training"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted_where_it_belongs(fault: mutations.Fault) -> None:
    text = (SOURCE / fault.file).read_text(encoding="utf-8")
    planted = fault.planted(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_says_what_it_does_and_who_would_see_it(fault: mutations.Fault) -> None:
    assert fault.does.endswith(".")
    names = mutations.listed()["near"][fault.file]
    assert all((ROOT / "tests" / f"test_{name}.py").is_file() for name in names)


def test_the_control_text_that_is_gone_or_stands_twice_is_told() -> None:
    fault = mutations.Fault("some", "some.py", "a = 1", "a = 2", "Something.")
    for text in ("b = 1\n", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match="and not once"):
            fault.planted(text)
