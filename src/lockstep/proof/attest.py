"""`lockstep attest OUTPUT` writes the hashes of a run's inputs, steps and results as one chain; `lockstep audit OUTPUT`
checks them, and recomputes random steps.

In: the OUTPUT of a finished run. Out: `OUTPUT/attestation/attestation.json`, signed if a key is given; or the first
difference from it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.manifest import FILE as MANIFEST
from lockstep.checkpoint.manifest import Manifest, broken, candidates, changed
from lockstep.config import output_files
from lockstep.config.errors import reason_of
from lockstep.config.output_files import require_output
from lockstep.config.run import RunError, load
from lockstep.data.job import Job
from lockstep.launchers import start
from lockstep.proof.replay import first_mismatch, replayed, run_to_recompute, start_of
from lockstep.track.console import Console
from lockstep.track.history import lines_of, scores_of
from lockstep.training import fingerprints
from lockstep.training.step_record import read_records
from lockstep_trace.coded import quantity

FORMAT = 1
FOLDER, NAME, SIGNATURE = "attestation", "attestation.json", "attestation.sig"
RESULTS = ("metrics.jsonl", "scores.json", "tables.json")  # in OUTPUT: what was measured
EXTRA = "pip install 'lockstep-train[signing]'"


def attest(output: Path, key: Path | None) -> int:
    """Write the attestation. Returns 0. Errors: `RunError` for a run that is not finished, or is damaged."""
    console, report = Console(True), describe(output)
    folder = output / FOLDER
    output_files.clear(folder)
    try:
        (output / SIGNATURE).unlink(missing_ok=True)
        folder.mkdir()
        (folder / NAME).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError("LS8011", f"{error.filename or folder} cannot be written: {reason_of(error).lower()}") from None
    if key is not None:
        _signing(key, "--key").signing.Config().use_elliptic_key_signer(private_key=str(key)).sign(
            str(folder), str(output / SIGNATURE)
        )
    steps_kept = ", ".join(str(each["step"]) for each in report["checkpoints"])
    if (text := export_hashes.note_of_edits(output)) is not None:
        console.say(f"note: {text}")
    console.say(f"{report['steps']} steps, checkpoints of {steps_kept}, {len(report['export'])} files of the export")
    console.say(f"{folder / NAME}: sha256 {report['sha256']}{', signed' if key else ''}")
    return 0


def describe(output: Path) -> dict[str, Any]:
    """Return the attestation of a finished run: the hashes of its files and the chain over its steps. Errors:
    `RunError`."""
    require_output(output)
    load(output / "run.yaml", [])  # refuses an invalid run file
    if (fault := export_hashes.damage(output)) is not None:
        raise RunError("LS8001", f"{output}: cannot be attested, because the export is missing or was changed: {fault}")
    checkpoints = [(path, each) for path, each in candidates(output) if isinstance(each, Manifest)]
    if not checkpoints:
        raise RunError("LS8002", f"{output}: cannot be attested without a checkpoint, and there is none")
    for path, manifest in checkpoints:
        if (fault := broken(path, manifest)) is not None:
            raise RunError("LS8003", f"{path}: {fault}; a run with a damaged checkpoint cannot be attested")
    newest = checkpoints[0][1]
    lines = list(_lines(output))
    if [line["step"] for line in lines] != list(range(1, newest.step + 1)):
        raise RunError(
            "LS8004",
            f"{output / fingerprints.FILE}: expected a line for each of the steps 1 to {newest.step}, but it "
            f"has {len(lines)} lines",
        )
    if (wrong := _of_numbers(output)) is not None:
        raise RunError("LS8005", f"{output}: cannot be attested: {wrong}")
    begun = start_of(output)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "run": newest.arithmetic,
        "run_file": export_hashes.sha256_of(output / "run.yaml"),
        "data": newest.data,
        "code": newest.code,
        "versions": newest.versions,
        "device": newest.device,
        "threads": newest.threads,
        "strategy": newest.strategy,
        "processes": begun.get("processes"),
        "steps": newest.step,
        "chain": chain(lines),
        "checkpoints": [
            {"step": m.step, "manifest": export_hashes.sha256_of(path / MANIFEST)} for path, m in checkpoints
        ],
        "export": _export(output),
        "exported_step": scores_of(output).get("step", newest.step),
        "results": {name: export_hashes.sha256_of(output / name) for name in RESULTS if (output / name).is_file()},
    }
    return facts | {"sha256": _seal(facts)}


def chain(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the hash of the last step's line, chained over the lines of all earlier steps."""
    link = hashlib.sha256(b"lockstep fingerprints").hexdigest()
    for line in lines:
        link = hashlib.sha256(f"{link} {json.dumps(line, sort_keys=True)}".encode()).hexdigest()
    return link


def _lines(output: Path) -> Iterator[dict[str, Any]]:
    return lines_of(output / fingerprints.FILE, ("step", "hash"))


def _export(output: Path) -> dict[str, str]:
    """Return the hashes of all files of the export, by name."""
    folder = output / "export"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): export_hashes.sha256_of(path) for path in files}


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _signing(key: Path, option: str) -> Any:
    """Import the package that signs. Errors: `RunError`."""
    if not key.is_file():
        raise RunError("LS8006", f"{option}: no such file: {key}; expected an elliptic-curve key in PEM format")
    try:
        import model_signing
    except ImportError as error:
        raise RunError(
            "LS8007", f"{option} needs the package model-signing ({error.name} is missing): {EXTRA}"
        ) from None
    return model_signing


# -- audit -----------------------------------------------------------------------------------------------------------


def audit(
    output: Path,
    samples: int,
    within: int,
    processes: int | None,
    key: Path | None,
    overrides: Sequence[str],
    seed: int | None = None,
) -> int:
    """Check everything that was attested, and recompute `samples` random steps, each from the checkpoint before it.
    Returns 0 if all matches the attestation, else 1. Errors: `RunError`."""
    if start.joining():
        raise RunError("LS8008", "lockstep audit starts its own processes; run it without torchrun or another launcher")
    console = Console(True)
    if not output.is_dir():
        require_output(output)
    try:
        then = json.loads((output / FOLDER / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError("LS8009", f"{output} has no readable {FOLDER}/{NAME}; lockstep attest writes it") from None
    if not isinstance(then, dict) or then.get("format") != FORMAT:
        raise RunError("LS8010", f"{output / FOLDER / NAME} was not written by this version of lockstep attest")
    wrong = (
        _of_signature(output, key, console)
        or _of_files(output, then)
        or _of_numbers(output)
        or _of_data(output, then, overrides)
        or _of_export(output, then, console)
    )
    if wrong is None:
        results = ", ".join(then["results"])
        console.say("run file, data, fingerprints, checkpoints and export match the attestation")
        console.say(f"so do {results}" if results else f"not attested, so not checked: {', '.join(RESULTS)}")
        wrong = _of_steps(console, output, then, samples, within, processes, overrides, seed)
    if wrong is not None:
        console.say(f"result: DIFFERENT from the attestation: {wrong}")
        return 1
    portable = load(output / "run.yaml", []).strategy.exact == "portable"
    elsewhere = "" if portable else ", and the bits on another kind of processor"
    console.say(
        "result: matches the attestation. Not checked: the results of steps that were not recomputed (their lines "
        f"are in the chain), and the scores (lockstep evaluate computes them again){elsewhere}"
    )
    return 0


def _of_signature(output: Path, key: Path | None, console: Console) -> str | None:
    signed = (output / SIGNATURE).is_file()
    if key is None:
        console.say("it is signed, and no --key was given to check the signature" if signed else "it is not signed")
        return None
    verifying = _signing(key, "--key").verifying
    if not signed:
        return "it is not signed, but a key was given"
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=str(key)).verify(
            str(output / FOLDER), str(output / SIGNATURE)
        )
    except Exception as error:  # each package below raises its own errors
        return f"the signature does not match this attestation and this key ({type(error).__name__})"
    console.say("the signature matches this key")
    return None


def _of_files(output: Path, then: Mapping[str, Any]) -> str | None:
    """Describe the first file of OUTPUT that differs from the attestation, or return None."""
    if then.get("sha256") != _seal({k: v for k, v in then.items() if k != "sha256"}):
        return "the attestation does not match its own hash"
    if export_hashes.sha256_of(output / "run.yaml") != then["run_file"]:
        return "run.yaml was changed"
    lines = list(_lines(output))
    if chain(lines) != then["chain"]:
        return f"{fingerprints.FILE} was changed: a step's line was edited, removed or added"
    there = {m.step: (path, m) for path, m in candidates(output) if isinstance(m, Manifest)}
    for each in then["checkpoints"]:
        if each["step"] not in there:
            return f"the checkpoint of step {each['step']} is missing, or its manifest is damaged"
        path, manifest = there[each["step"]]
        if export_hashes.sha256_of(path / MANIFEST) != each["manifest"]:
            return f"the checkpoint of step {each['step']} was changed"
        if (fault := broken(path, manifest)) is not None:
            return f"the checkpoint of step {each['step']}: {fault}"
    for name in RESULTS:
        if then["results"].get(name) != (export_hashes.sha256_of(output / name) if (output / name).is_file() else None):
            return f"{name} was changed: a score, for example"
    if (files := _export(output)) != then["export"]:
        names = sorted(n for n in files.keys() | then["export"].keys() if files.get(n) != then["export"].get(n))
        return f"the export was changed: {', '.join(names[:4])}"
    return None


def _of_numbers(output: Path) -> str | None:
    """Describe the first invalid record (its hash does not match its numbers, or it holds NaN), or return None."""
    import torch
    from safetensors import safe_open

    skips = load(output / "run.yaml", []).skips_nonfinite
    for record in fingerprints.recorded(output):
        if (fault := record.fault(skips)) is not None:
            return f"{fingerprints.FILE}: step {record.step}: {fault}"
    for path in sorted((output / "export").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if bool(torch.isnan(file.get_tensor(name)).any()):
                    return f"export/{path.name}: {name} holds NaN"
    return None


def _of_data(output: Path, then: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Describe how the data, tokenizer or code differ from the attested ones, or return None."""

    run = run_to_recompute(output, overrides, None, 1)
    prepared = Job.of(run).with_data(fresh=True).data
    if prepared.key != then["data"]:
        return "the data or the tokenizer differ from those of the training: a row was changed, for example"
    trained = next(m for _, m in candidates(output) if isinstance(m, Manifest))
    if (why := changed(replace(Job.of(run.into(output)), prepared=prepared), trained)) is not None:
        return " ".join(why.split())
    return None


def _of_export(output: Path, then: Mapping[str, Any], console: Console) -> str | None:
    """Describe how the export differs from its checkpoint, or return None; print if this cannot be checked."""
    from lockstep.training.checkpoint_model import exported_checkpoint
    from lockstep.training.summary import digest_of

    step, run = then["exported_step"], load(output / "run.yaml", []).into(output)
    if run.average.last is not None:
        console.say(f"not checked: whether the export is {run.average.summary}")
        return None
    path = next((p for p, m in candidates(run.folder) if isinstance(m, Manifest) and m.step == step), None)
    if path is None:
        return f"the export names step {step}, which has no checkpoint"
    digest = digest_of(exported_checkpoint(output, path), None)
    if digest is None:
        console.say(
            f"not checked: whether the export is of the checkpoint of step {step}, because its format has no "
            "comparable hash"
        )
    elif digest != digest_of(output / "export", None):
        return f"the export's weights are not those of the checkpoint of step {step}"
    return None


def _of_steps(
    console: Console,
    output: Path,
    then: Mapping[str, Any],
    samples: int,
    within: int,
    processes: int | None,
    overrides: Sequence[str],
    seed: int | None,
) -> str | None:
    """Recompute random steps; describe the first that differs from its record, or return None."""
    from lockstep.proof.replay_rank import RECORDS

    steps, draw = then["steps"], random.Random(seed)
    begins = sorted({0, *(each["step"] for each in then["checkpoints"])} - {steps})
    reach = {s: max(b for b in begins if b < s) for s in range(1, steps + 1)}
    near = [s for s, begin in reach.items() if s - begin <= within]
    chosen = sorted(draw.sample(near, min(samples, len(near))))
    last = {reach[step]: step for step in chosen}  # per checkpoint, the last step drawn
    if processes is None:
        processes = 1 if (then["processes"] or 1) > 1 else 2
    run = run_to_recompute(output, overrides, None, processes)
    total = sum(step - begin for begin, step in last.items())
    console.say(
        f"{len(chosen)} of {steps} steps were drawn ({len(near)} are within {within} of a checkpoint or the start); "
        f"{total} are recomputed by {quantity(processes, 'process')} under {run.strategy.name}"
    )
    for begin, step in last.items():
        with replayed(run, output, step, begin) as (status, folder):
            if status:
                return f"steps {begin + 1} to {step} could not be recomputed (status {status})"
            about, records = read_records(folder / RECORDS)
        if about["from"] != begin:
            return f"the checkpoint of step {begin} cannot be used: {'; '.join(about['notes'])}"
        if (wrong := first_mismatch(records, fingerprints.recorded(output), run.skips_nonfinite)) is not None:
            return wrong
        console.say(f"steps {begin + 1} to {step}: the same bits")
    return None
