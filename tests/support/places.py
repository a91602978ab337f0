"""Where things are: the checkout, its tests, and what a job's interpreter imports `support` from."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TESTS_PATH = str(TESTS)  # in PYTHONPATH: names as `support.waiting_strategy.Held` in run files
