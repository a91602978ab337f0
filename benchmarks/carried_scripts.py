"""Scripts of other systems, run beside the run files that `lockstep init --from` writes for them.

In: names of cases of `carried_cases.py`, or none for all of them. Out: a line per case: what differs between the
script, run as it is (`carried_recorder.py`), and `lockstep train` of its run file, and whether `init` said so:
  steps     number of optimizer steps
  examples  examples of each step
  rates     learning rate of each step
  loss      loss of each step, where a step has all examples, so that their order does not matter
  weights   change of each weight over the run, where a step has all examples
Models are tiny, made here and without dropout; data are 16 examples. A case whose library is not installed is left out.
  python benchmarks/carried_scripts.py [CASE ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from carried_cases import CASES, Case, write_inputs
from safetensors.torch import load_file

HERE = Path(__file__).parent
# A bias of keys has no gradient but rounding, of which an optimizer that divides by its size makes a whole step.
NO_GRADIENT = ("key.bias", "k_proj.bias", "c_attn.bias", "k_lin.bias")
LOSS, CHANGE = 2e-5, 2e-2  # relative; the change of a weight over the run, by its norm


def command(words: list[str], folder: Path, log: str) -> tuple[int, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"WANDB_MODE": "disabled", "PYTHONPATH": str(folder)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    (folder / log).write_text(done.stdout + done.stderr)
    return done.returncode, done.stdout + done.stderr


def compare(case: Case, inputs: Path, folder: Path) -> tuple[list[str], str]:
    """Return differences between a script and its run file, and what init said."""
    shutil.copytree(inputs, folder)
    file = folder / case.file
    file.write_text(case.text)
    words = [*case.words, "launch.processes=1"]
    lockstep = [sys.executable, "-m", "lockstep"]
    code, said = command([*lockstep, "init", "run.yaml", "--from", case.file, *words], folder, "init.log")
    if code:
        return ["init refused it: " + said[-600:]], said
    original = folder / (case.file if case.reference is None else "reference.py")
    if case.reference is not None:
        original.write_text(case.reference)
    (folder / "original").mkdir()
    recorder = str(HERE / "carried_recorder.py")
    code, out = command([sys.executable, recorder, "original", original.name, *case.arguments], folder, "original.log")
    if code:
        return ["the script itself failed: " + out[-600:]], said
    extra = ["track.every=1", "launch.device=cpu", "output=out_lockstep", *case.train_words]
    code, out = command([*lockstep, "train", "run.yaml", *extra], folder, "train.log")
    if code:
        return ["lockstep train failed: " + out[-600:]], said
    return differences(case, folder), said


def differences(case: Case, folder: Path) -> list[str]:
    recorded = json.loads((folder / "original" / "steps.json").read_text())
    lines = (folder / "out_lockstep" / "metrics.jsonl").read_text().splitlines()
    ours = [line for line in map(json.loads, lines) if line["split"] == "train"]
    theirs = recorded["steps"]
    unequal = []
    if len(theirs) != len(ours):
        unequal.append(f"steps: {len(theirs)} there, {len(ours)} here")
    sizes = [step["examples"] // case.rows_per_example for step in theirs]
    if sizes != case.sizes(folder, len(theirs)):
        unequal.append(f"examples: {sizes} there, {case.sizes(folder, len(theirs))} here")
    rates = [step["rates"] for step in theirs]
    mine = [[line["learning_rate"]] for line in ours]
    apart = [k for k, (a, b) in enumerate(zip(rates, mine, strict=False)) if not near(a, b)]
    if apart:
        unequal.append(f"rates: {rates} there, {mine} here (step {apart[0] + 1})")
    if case.whole:
        for k, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            if abs(a["loss"] - b["loss"]) > LOSS * max(1, abs(a["loss"])) * (k + 1):
                kind = "loss" if k else "first loss"
                unequal.append(f"{kind}: {a['loss']:.7f} there, {b['loss']:.7f} here (step {k + 1})")
                break
        unequal += weights_apart(folder, recorded["decays"])
    return unequal


def near(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= 1e-9 + 1e-6 * abs(a) for a, b in zip(one, other, strict=True))


def weights_apart(folder: Path, decays: dict[str, float]) -> list[str]:
    saved = torch.load(folder / "original" / "weights.pt")
    exported = {}
    for file in (folder / "out_lockstep" / "export").glob("*.safetensors"):
        exported |= load_file(file)
    apart, missing = [], []
    for name, before in saved["before"].items():
        key = next((k for k in (name, *shorter(name)) if k in exported), None)
        if key is None:
            missing.append(name)
            continue
        change = (saved["after"][name] - before).norm().item()
        off = (exported[key] - saved["after"][name]).norm().item()
        if off > CHANGE * change + 1e-7 and not name.endswith(NO_GRADIENT):
            apart.append(f"{name} {off / max(change, 1e-12):.3f} (decay {decays.get(name)})")
    unequal = [f"weights: {len(apart)} of {len(saved['before'])} differ: {'; '.join(apart[:6])}"] if apart else []
    return unequal + ([f"weights: not in the export: {missing[:5]}"] if missing else [])


def shorter(name: str) -> list[str]:
    """Names without their first parts, as a wrapped model has them."""
    parts = name.split(".")
    return [".".join(parts[k:]) for k in range(1, len(parts))]


def main() -> int:
    reader = argparse.ArgumentParser()
    reader.add_argument("cases", nargs="*")
    reader.add_argument("--folder", type=Path)
    asked = reader.parse_args()
    top = asked.folder or Path(tempfile.mkdtemp())
    top.joinpath("inputs").mkdir(parents=True)
    write_inputs(top / "inputs")
    silent = 0
    for name, case in CASES.items():
        if asked.cases and name not in asked.cases:
            continue
        if any(importlib.util.find_spec(library) is None for library in case.needs):
            print(f"{name}: left out, {' and '.join(case.needs)} not installed", flush=True)
            continue
        unequal, said = compare(case, top / "inputs", top / name)
        unsaid = [each for each in unequal if not any(each.startswith(k) and v in said for k, v in case.said.items())]
        silent += bool(unsaid)
        print(f"{name}: {'equal' if not unequal else 'DIFFERS' if unsaid else 'differs, and init says so'}", flush=True)
        for each in unequal:
            print(f"  {'' if each in unsaid else '(said) '}{each}", flush=True)
    print(f"{silent} differ without a word, or failed; files in {top}")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
