"""The museum: every silent fault is found, with its cause first, and healthy scripts have no finding. A few of them
here, all of them by `pytest -m long`. Starts processes."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep_trace.rules.observed import KINDS
from museum.exhibits import FAULTS, HEALTHY
from museum.patches import PATCHES
from museum.reports import REPORTS
from support.answer_cases import ANSWERS, ANSWERS_SUSPECTED
from support.command import Process, ended, start, start_anew
from support.composed_cases import COMPOSED
from support.contradiction_cases import CONTRADICTIONS
from support.evidence_cases import EVIDENCE, EVIDENCE_SUSPECTED
from support.forked import FORK_TRACED
from support.given_cases import GIVEN, GIVEN_SUSPECTED
from support.layer_cases import LAYERS, LAYERS_SUSPECTED
from support.noise_cases import NOISE, NOISE_SUSPECTED
from support.places import ROOT
from support.proved_cases import LIKELY, PROVED
from support.state_cases import STATE, STATE_SUSPECTED
from support.suspected_cases import SUSPECTED
from support.traced_cases import PAIRS
from support.update_cases import UPDATES, UPDATES_SUSPECTED

QUICK = ("no-set-epoch", "around-wrapper", "summed", "stale-optimizer", "mean-of-ranks", "one-shard", "numpy-workers")
AS_RELEASED = ("version", "patch", "library")
QUICK_HEALTHY = ("--batch 16 --wrap fsdp1", "--cut tensor-data", "--batch 32 --workers 2")


def codes() -> set[str]:
    """Return the codes of findings without `--check`; those of `--check` are in tests/trace/test_check.py."""
    rules = ROOT / "packages" / "lockstep-trace" / "src" / "lockstep_trace" / "rules"
    text = "\n".join(path.read_text() for path in rules.glob("*.py") if path.name != "checks.py")
    written = {*re.findall(r'Finding\(\s*"([a-z-]+)"', text), *re.findall(r'return "([a-z-]+)"', text)}
    return written | {code for code, *_ in KINDS.values()}


def test_every_finding_has_an_exhibit() -> None:
    assert len(codes()) > 25
    shown = {e.expected for e in FAULTS if e.reference is None}
    in_tests = {
        "packed-rows",
        "equal-shards",
        "labels-without-offset",
        "parts-overlap",
        "reduced-after-step",
        "same-noise",
        "best-is-worst",
        "codes-of-split",
        "column-removed",
        "logits-above-half",
        "mean-of-batches",
        "never-reset",
        "step-while-accumulating",
        "no-effect",
        "one-object",
        "one-rank-steps",
        "ranks-undivided",
        "reference-is-policy",
        "split-by-rank",
    }  # tests/trace
    proved = PAIRS | PROVED | LAYERS | NOISE | STATE | ANSWERS | UPDATES | EVIDENCE | GIVEN
    likely = SUSPECTED | LIKELY | CONTRADICTIONS | LAYERS_SUSPECTED | NOISE_SUSPECTED | STATE_SUSPECTED
    likely |= ANSWERS_SUSPECTED | UPDATES_SUSPECTED | EVIDENCE_SUSPECTED | GIVEN_SUSPECTED
    likely |= {code: code for codes_ in COMPOSED.values() for code in codes_}
    assert codes() - shown - {*proved.values(), *likely.values()} == in_tests


def run(cache: Path, *arguments: str, begin: Callable[..., Process] = start_anew, **variables: str) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "silent_faults.py"), "run", *arguments]
    status, out, err = ended(begin(words, ROOT, cache, **variables), 3500)
    assert status == 0, out + err[-2000:]


def test_the_page_has_every_exhibit() -> None:
    page = (ROOT / "benchmarks/results/museum.md").read_text()
    assert [e.name for e in FAULTS if f"| {e.name} |" not in page and f"| [{e.name}](" not in page] == []
    assert len({(e.name, e.script) for e in FAULTS}) == len(FAULTS) >= 40
    assert set(REPORTS) <= {e.name for e in FAULTS}
    assert len([r for r in REPORTS.values() if r.how in AS_RELEASED]) >= 20
    assert all(p.lines <= 10 for p in PATCHES.values())
    assert {e.name for e in FAULTS if e.libraries} == {n for n, r in REPORTS.items() if r.how == "version"}
    assert set(PATCHES) == {n for n, r in REPORTS.items() if r.how == "patch"}
    assert len(set(HEALTHY)) == len(HEALTHY) >= 60
    assert [h.arguments for h in HEALTHY if f"`{h.script} {h.arguments}`" not in page] == []


@pytest.mark.processes
def test_a_few_faults_are_found_and_named(cache: Path) -> None:
    """A few faults with the installed libraries, in processes that have imported them."""
    assert not [e.name for e in FAULTS if e.name in QUICK and e.libraries]
    run(cache, "--only", *QUICK, begin=start, **{FORK_TRACED: "1"})


@pytest.mark.processes
@pytest.mark.slow
def test_a_few_healthy_scripts_have_no_finding(cache: Path) -> None:
    run(cache, "--healthy", "--only", *QUICK_HEALTHY, begin=start, **{FORK_TRACED: "1"})


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_fault_is_found_and_named(cache: Path) -> None:
    run(cache)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_healthy_scripts_have_no_finding(cache: Path) -> None:
    run(cache, "--healthy")
