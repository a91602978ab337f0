"""A traced run has the bits of an untraced one, under each engine, and its standard output. Starts processes."""

import re
import sys
from pathlib import Path

import pytest

from support.command import LOCKSTEP, ended, start
from support.forked import FORK_TRACED
from support.marks import long, slow
from support.places import TESTS

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# --divisible: what pads a partition of ZeRO is not initialized, and the judge would read it
ENGINES = {  # name: (script, arguments, processes, modules it needs)
    "plain": ("loop.py", "--batch 32 --dropout 0.1 --evaluate", 1, ()),
    "scaler": ("loop.py", "--batch 32 --amp float16", 1, ()),
    "compile": ("loop.py", "--batch 32 --wrap compile", 1, ()),
    "ddp": ("loop.py", "--batch 8 --accumulate 2 --dropout 0.1", 2, ()),
    "fsdp2": ("loop.py", "--batch 16 --wrap fsdp", 2, ()),
    "fsdp1": ("loop.py", "--batch 16 --wrap fsdp1", 2, ()),
    "fsdp1-original": ("loop.py", "--batch 16 --wrap fsdp1 --original", 2, ()),
    "accelerate": ("engines.py", "--engine accelerate --batch 4 --accumulate 2", 2, ("accelerate", "transformers")),
    "trainer": ("engines.py", "--engine trainer --batch 4", 2, ("accelerate", "transformers")),
    "lightning": ("lightning_module.py", "--batch 8", 2, ("lightning",)),
    "tensor-parallel": ("parallel.py", "--cut tensor", 2, ()),
    "pipeline": ("parallel.py", "--cut stages", 2, ()),
    "sharded-optimizer": ("parallel.py", "--cut optimizer", 2, ()),
    "zero-1": ("sharded.py", "--stage 1 --divisible", 2, ("deepspeed",)),
    "zero-2": ("sharded.py", "--stage 2 --divisible", 2, ("deepspeed",)),
    "zero-3": ("sharded.py", "--stage 3 --divisible", 2, ("deepspeed",)),
}
ANEW = ("plain", "compile", "zero-3")  # traced from their first import on, into `t`
QUICK = ("plain", "fsdp2")
# By hand: DeepSpeed's stages, and engines whose cuts "fsdp2" has, too.
LONG = (
    "ddp",  # Accelerate wraps it
    "zero-1",
    "zero-2",
    "zero-3",
    "fsdp1",
    "fsdp1-original",
    "sharded-optimizer",
    "tensor-parallel",
    "pipeline",
    "scaler",
)


def digests(name: str, folder: Path, *options: str) -> tuple[list[str], str]:
    """The last line of each rank: steps and a checksum of the weights after each; and standard error."""
    script, arguments, processes, modules = ENGINES[name]
    for module in modules:
        pytest.importorskip(module)
    words = LAUNCHER if processes > 1 else [sys.executable]
    words = [*words, str(HERE / "weight_digest.py"), str(TESTS / "museum" / script), *arguments.split()]
    if options:
        words = [*LOCKSTEP, "trace", *options, "--", *words]
    variables = {} if name in ANEW and options == ("-o", "t") else {FORK_TRACED: "1"}
    status, out, err = ended(start(words, folder, folder / "cache", **variables), 250)
    assert status == 0, out + err[-3000:]
    lines = re.findall(r"digest \d+ [0-9a-f]{8}", out)
    assert len(lines) == processes
    return sorted(lines), err


@pytest.mark.parametrize("name", [n if n in QUICK else long(n) if n in LONG else slow(n) for n in ENGINES])
def test_a_traced_run_has_the_bits_of_an_untraced_one(name: str, tmp_path: Path) -> None:
    """The control is a run with weights perturbed in their last bit: the judge sees that."""
    plain, _ = digests(name, tmp_path)
    assert all(int(line.split()[1]) >= 4 for line in plain)
    traced, said = digests(name, tmp_path, "-o", "t")
    assert traced == plain
    assert "internal error of the tracer" not in said
    assert re.search(r"[1-9]\d* steps of", said)
    if name == "plain":
        assert digests(name, tmp_path, "-o", "modules", "--level", "modules")[0] == plain
        assert digests(name, tmp_path, "-o", "perturbed", "--perturb")[0] != plain
