"""Versions of an engine, each by `lockstep verify` on the quick start: which compute what one process computes.

In: a package, versions of it (default: the oldest and the newest that pyproject.toml lets in, and those of
strategies/engines/zero_agreement.py), and strategies to verify (default: the cases of the package). Out: a line of JSON
a version and case in --out: `ok`, `refused`, or what was said. pip installs each version, without its dependencies,
into a folder that stands before the environment; nothing of the environment changes. A job by hand, for when a range
in pyproject.toml moves. `--although-refused` runs versions that lockstep refuses, to see whether they are wrong.
Example: python benchmarks/engine_versions.py --walk --out engine-versions.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from lockstep.strategies.engines import zero_agreement

SMALL = ["model.config.n_layer=2", "data.limit=200", "launch.processes=2", "launch.threads=1", "launch.device=cpu"]
OFFLOADED = "strategy.options={zero_optimization: {offload_optimizer: {device: cpu}}}"
OVERLAPPED = "strategy.options={zero_optimization: {overlap_comm: true}}"
IN_FP32 = "strategy.options={bf16: {enabled: true}, data_types: {grad_accum_dtype: fp32}}"
PRETRAINED = "PRETRAINED"  # placeholder for a folder exported by a step of the quick start
LORA = [f"model.source={PRETRAINED}", "model.type=null", "model.config={}", "tokenizer.train=null"]
LORA += ["model.adapter={type: lora, r: 4, target_modules: [c_attn]}"]
# Package -> cases to verify: entries of the run file.
CASES: dict[str, list[list[str]]] = {
    "deepspeed": [
        *([f"strategy.name=zero{stage}"] for stage in (1, 2, 3)),
        *([f"strategy.name=zero{stage}", OFFLOADED] for stage in (1, 2, 3)),
        *([f"strategy.name=zero{stage}", OVERLAPPED] for stage in (1, 2)),
        ["strategy.name=zero1", "precision=bf16", IN_FP32, "strategy.exact=false"],
    ],
    "accelerate": [["strategy.name=hf_accelerate"], ["strategy.name=hf_trainer"]],
    "peft": [["strategy.name=ddp", *LORA], ["strategy.name=fsdp2", *LORA]],
    "bitsandbytes": [["strategy.name=ddp", *LORA, "model.quantization=nf4"]],
    "transformers": [["strategy.name=ddp"], ["strategy.name=hf_trainer"], ["strategy.name=fsdp2"]],
    "torch": [[f"strategy.name={name}"] for name in ("ddp", "fsdp2", "hf_accelerate", "hf_trainer", "zero2")],
}
BLIND = """import importlib.metadata, sys
_version = importlib.metadata.version
REFUSING = ("lockstep.strategies.engines.zero_agreement", "lockstep.config.plugins")
def version(name):
    if sys._getframe(1).f_globals["__name__"] in REFUSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return _version(name)
importlib.metadata.version = version
"""  # as `sitecustomize`: zero_agreement.py and plugins.py find no engine whose version they could refuse


def asked(package: str) -> Requirement:
    """Requirement of a package in pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return next(found for group in groups for line in group if (found := Requirement(line)).name == package)


def released(package: str) -> list[Version]:
    """Released versions in the registry, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = next(line for line in said.splitlines() if line.startswith("Available versions:")).partition(":")[2]
    return sorted(Version(name) for name in re.split(r",\s*", names.strip()))


def walked(package: str) -> list[str]:
    """The ends of the range, and for each known-bad interval the last version before the fix."""
    versions, wanted = released(package), asked(package).specifier
    inside = [version for version in versions if version in wanted]
    ends = [inside[0], inside[-1]]
    if package == "deepspeed":
        ends += [max(v for v in versions if v < Version(bad.mended)) for bad in zero_agreement.DEEPSPEED]
    return [str(version) for version in sorted({*ends})]


def verified(folder: Path, entries: list[str], timeout_s: float) -> dict[str, Any]:
    """Output of `lockstep verify` with the packages of a folder placed first."""
    before = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(before), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as output:
        if any(PRETRAINED in entry for entry in entries):
            model = pretrained(Path(output) / "pretrained")
            kept = [entry for entry in entries if not entry.startswith("model.config.")]
            entries = [entry.replace(PRETRAINED, model) for entry in kept]
        command = [sys.executable, "-m", "lockstep", "verify", *entries, f"output={output}/run"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        try:
            lines = [line for line in process.communicate(timeout=timeout_s)[0].splitlines() if line.strip()]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # and its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            return {"outcome": f"no answer within {timeout_s:.0f} s"}
    outcome = {0: "ok", 2: "refused"}.get(process.returncode, "wrong")
    said = lines[-1:] if outcome == "ok" else lines[-4:]
    return {"outcome": outcome, "status": process.returncode, "said": said}


def pretrained(folder: Path) -> str:
    """Export a small model and its tokenizer."""
    entries = [*SMALL, "steps=1", "launch.processes=1", "task.samples=0", f"output={folder}"]
    subprocess.run([sys.executable, "-m", "lockstep", "train", *entries], check=True, stdout=sys.stderr)
    return str(folder / "export")


def install(package: str, version: str, folder: Path, dependencies: bool) -> None:
    options = [] if dependencies else ["--no-deps"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(folder), f"{package}=={version}"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def record(package: str, version: str, options: argparse.Namespace) -> None:
    """Return one line per case of a version."""
    cases = [[f"strategy.name={name}"] for name in options.strategies or ()] or CASES[package]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            install(package, version, folder, options.with_dependencies)
        except subprocess.CalledProcessError as error:
            outcomes = {"outcome": f"not installed: pip ended with status {error.returncode}"}
            write(options.out, {"package": package, "version": version} | outcomes)
            return
        if options.although_refused:
            (folder / "sitecustomize.py").write_text(BLIND)
        for entries in cases:
            line: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "package": package, "version": version}
            line |= {"in_range": Version(version) in asked(package).specifier, "entries": [*entries, *options.set]}
            if options.although_refused:
                line["although_refused"] = True
            if package != "torch":
                line["torch"] = importlib.metadata.version("torch")
            write(options.out, line | verified(folder, [*SMALL, *entries, *options.set], options.timeout))


def write(out: Path | None, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", choices=CASES)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--walk", nargs="*", metavar="PACKAGE", help="the ranges of these, or of all but torch")
    parser.add_argument("--strategies", nargs="+")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="entries of the run file")
    parser.add_argument("--although-refused", action="store_true", help="switch off what refuses versions")
    parser.add_argument("--with-dependencies", action="store_true", help="pip installs what the version needs, too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one case")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.package is None and options.walk is None:
        parser.error("name a package, or --walk")
    packages = [options.package] if options.package else options.walk or [name for name in CASES if name != "torch"]
    for package in packages:
        for version in options.versions or walked(package):
            record(package, version, options)


if __name__ == "__main__":
    main()
