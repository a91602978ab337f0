"""An engine library that cannot be imported disables only its own strategies, and `lockstep list` still works."""

import subprocess
import sys

import pytest

LIST = """
import sys
sys.modules[{engine!r}] = None
from lockstep import cli
from lockstep.config import plugins
assert cli.main(["list"]) == 0
for name in plugins.names("strategies"):
    try:
        plugins.find("strategies", name)
        print(name, "is there")
    except ImportError:
        print(name, "is not")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "gone"),
    [
        ("torch.distributed.fsdp", ["fsdp2", "pipeline"]),  # torch.distributed.pipelining imports it
        ("torch.distributed.pipelining", ["pipeline"]),
    ],
)
def test_other_strategies_work_without_an_engine(engine: str, gone: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LIST.format(engine=engine)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" is not")]
    there = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" is there")]
    assert missing == gone
    assert {"single", "allreduce", "ddp", "hf_accelerate", "hf_trainer", "zero3"} < set(there)
