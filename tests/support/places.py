"""Paths: the checkout, its tests, and the import path of `support` in jobs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TESTS_PATH = str(TESTS)  # for PYTHONPATH: names such as `support.waiting_strategy.Held` in run files
