"""Findings of one trace: each fault is proved, and its healthy neighbours are accused of nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep_trace import tracer
from lockstep_trace.findings import findings, proved
from lockstep_trace.read import read
from lockstep_trace.tracer.settings import Settings
from support.traced_cases import PAIRS, RIGHT, a_stream_of_workers, no_target_that_counts

CASES = [pytest.param(c, marks=pytest.mark.processes if c is a_stream_of_workers else ()) for c in PAIRS]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_fault_is_proved_and_what_looks_like_it_is_not_accused(
    tmp_path: Path, case: Callable[[bool], None], wrong: bool
) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case(wrong)
    tracer.end()
    trace = read(tmp_path)
    assert [e["text"] for e in trace.ranks[0].errors] == []
    assert {f.code for f in proved(findings(trace))} == ({PAIRS[case]} if wrong else set())


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_right_programs_of_unusual_styles_are_not_accused(tmp_path: Path, case: Callable[[], None]) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    case()
    tracer.end()
    assert proved(findings(read(tmp_path))) == []


def test_a_nan_in_each_step_is_not_said_to_be_zeroed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tracer.begin(Settings(str(tmp_path)))
    no_target_that_counts(True)
    tracer.end()
    (finding,) = proved(findings(read(tmp_path)))
    assert "the loss is nan in each of them, and no target counts" in finding.what
    assert "no target counts: every label is ignored" in finding.cause
