"""Versions of an engine, each by `lockstep verify` on the quick start: which compute what one process computes.

In: a package, versions of it, and the strategies to verify. Out: a line of JSON a version and strategy: `ok`, or the
last line that was said. pip installs each version, without what it needs, into a folder of its own that stands before
the environment; nothing of the environment changes. Run by hand when a range in pyproject.toml moves: its oldest and
newest versions, and those that strategies/engines/known_bad.py has.
Example: python benchmarks/engine_versions.py deepspeed 0.18.2 0.19.0 0.19.8 --strategies zero1 zero2 zero3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def verified(folder: Path, strategy: str, entries: list[str], timeout_s: float) -> dict[str, str]:
    """What `lockstep verify` says with the packages of a folder before all others."""
    before = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(before), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", "verify", f"strategy.name={strategy}", *entries]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        lines = process.communicate(timeout=timeout_s)[0].splitlines()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # its ranks, too
        process.communicate()
        return {"outcome": f"no answer within {timeout_s:.0f} s"}
    outcome = "ok" if process.returncode == 0 else "wrong or refused"
    return {"outcome": outcome, "said": next((line for line in reversed(lines) if line.strip()), "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--strategies", nargs="+", required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="entries of the run file")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one strategy")
    options = parser.parse_args()
    for version in options.versions:
        with tempfile.TemporaryDirectory() as name:
            wanted = f"{options.package}=={version}"
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", name, wanted]
            subprocess.run(install, check=True, stdout=sys.stderr)
            for strategy in options.strategies:
                found = verified(Path(name), strategy, options.set, options.timeout)
                print(json.dumps({options.package: version, "strategy": strategy} | found), flush=True)


if __name__ == "__main__":
    main()
