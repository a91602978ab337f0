"""Which keys of the run file have no effect, and say nothing: each key of each kind of task is set to another value.

    python benchmarks/silent_keys.py [--kinds NAME ...] [--keys REGEX]     prints a line of JSON a kind

In: tests/support/silent_keys.py. Out: of each key `refused CODE`, `noted`, what differs from the run without it, or
`nothing`: weights and losses (fingerprints), metrics, scores, samples, names of files, the export and lines on the
terminal. A run is two steps of a tiny model with evaluations, about a second of processor time, in a process forked
from one that has imported everything.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from crossed import families  # noqa: E402
from crossed.draw import TASKS, plainest  # noqa: E402
from crossed.job import job_of  # noqa: E402
from lockstep.cli import main as lockstep  # noqa: E402
from lockstep.config.error_messages import flat  # noqa: E402
from support.harness import PRELOADED  # noqa: E402
from support.silent_keys import FUNCTIONS, KINDS, keys_of, words_of  # noqa: E402

LIMIT_S = 120
LOGS = ("metrics.jsonl", "fingerprints.jsonl", "samples.jsonl", "scores.json")
RUN_FILE = re.compile(r"(`{3,})yaml.*?\1", re.DOTALL)  # in the model card, with every key in it
TIMES = re.compile(r"\d[\d.,]* ?(s|ms|min|h|[MGK]iB|[kMG]B|\w+/s|/s|%)\b|\d+:\d\d(:\d\d)?|\d{4}-\d\d-\d\d[T ][\d:.]+Z?")
TIMED = re.compile(r"second|time|per_s|memory|_s$|speed|gib|share|wait")
# Terminal lines that depend on times, the cache, or the run's name.
UNALIKE = re.compile(r"(repeat|report|next) |\w+ +prepared in |.*(Writing model shards|it/s\])")


def prepare(kind: str, folder: Path) -> dict[str, Any]:
    """Write rows, other files, a tokenizer, a model and run.yaml of a kind. Returns the run's keys, flat."""
    case = plainest({"task": kind}) | {"evaluated at once": None, "reading": "files" if kind == "module" else "overlap"}
    job, others = job_of(case), job_of(case | {"seed": 7})
    for each in (job, others):
        each.run.get("data", {}).pop("decontaminate", None)
        each.rows.update({"repeated": True} if each.rows else {})
    (folder / "others").mkdir(parents=True)
    others.write(folder / "others")
    job.write(folder)
    task = {key: value for key, value in job.run["task"].items() if key not in ("samples", "bleu", "rouge")}
    run = job.run | {"task": task, "steps": 2, "evaluate": {"every": 1}, "fingerprint": {"every": 1}}
    run |= {"verify": {"plain": False}, "checkpoint": {"every": 0}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False, allow_unicode=True))
    (folder / "metricfile.py").write_text("def always_one(predictions, labels):\n    return 1.0\n")
    if job.code:
        (folder / "mine.py").write_text(job.code + FUNCTIONS)
    else:
        (folder / "others/data").rename(folder / "data2")
    if kind not in ("module", "image_classification"):
        texts = [line for path in sorted((folder / "data").rglob("*.jsonl")) for line in path.open()]
        families.make_tokenizer(folder / "tok", {"side": "right", "framed": True}, texts)
        config = run["model"]["config"]
        families.make_model(folder / "mod", TASKS[kind][0], case["family"], config, folder / "tok")
    return flat(run)


def observed(folder: Path, words: list[str], name: str) -> dict[str, Any]:
    """Observations of a run in its own process, which ends within `LIMIT_S`."""
    output = f"out-{name}"
    log = folder / f"{output}.log"
    if (child := os.fork()) == 0:
        _train(folder, [*words, f"output={output}"], log)
    ended, status = 0, 9
    late = time.monotonic() + LIMIT_S
    while not ended and time.monotonic() < late:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if not ended:
        os.killpg(child, 9)
        os.waitpid(child, 0)
    seen = _results(folder / output) | {
        "status": os.waitstatus_to_exitcode(status) if ended else "late",
        "terminal": _plain(log.read_text(errors="replace"), output),
    }
    shutil.rmtree(folder / output, ignore_errors=True)
    return seen


def _train(folder: Path, words: list[str], log: Path) -> None:
    """Train; never returns."""
    status: Any = 99
    try:
        os.setsid()
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
        log.write_text("")
        status = lockstep(["train", "run.yaml", *words])
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 98)


def _plain(text: str, output: str) -> str:
    lines = TIMES.sub("T", RUN_FILE.sub("", text.replace(output, "OUT"))).splitlines()
    return "\n".join(line for line in lines if not UNALIKE.match(line))


def _results(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in LOGS:
        lines = (output / name).read_text().splitlines() if (output / name).exists() else []
        whole = ["".join(lines)] if name.endswith(".json") and lines else lines
        found[name.partition(".")[0]] = [_untimed(json.loads(line)) for line in whole]
    files = [path for path in sorted(output.rglob("*")) if path.is_file()]
    found["files"] = sorted(re.sub(r"step-\d+", "step", str(path.relative_to(output))) for path in files)
    found["export"] = {
        str(path.relative_to(output)): hashlib.sha256(
            _plain(path.read_text(), output.name).encode() if path.suffix == ".md" else path.read_bytes()
        ).hexdigest()
        for path in files
        if path.is_relative_to(output / "export")
    }
    return found


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(inner) for key, inner in value.items() if not TIMED.search(key)}
    return value


def outcome(base: dict[str, Any], changed: dict[str, Any], key: str) -> str:
    """Effect of a changed key."""
    before = base["terminal"].splitlines()
    new = [line for line in changed["terminal"].splitlines() if line not in before]
    if changed["status"] == 2:
        return f"refused {' '.join(sorted({code for line in new for code in re.findall(r'LS[0-9]{4}', line)}))}"
    if changed["status"] != 0:
        return f"status {changed['status']}: {' / '.join(new[-2:])[:300]}"
    if any(f"{key}" in line and "no effect" in line for line in new):
        return "noted"
    return " ".join(name for name in base if name != "status" and base[name] != changed[name]) or "nothing"


def of_kind(kind: str, folder: Path, keys: re.Pattern[str]) -> dict[str, str]:
    """Outcome of each key of a kind of task. Errors: `AssertionError` if the run does not end, or is not
    reproducible."""
    run = prepare(kind, folder)
    base, again = observed(folder, [], "base"), observed(folder, [], "again")
    assert base["status"] == 0, base["terminal"][-2000:]
    unlike = [(base[name], again[name]) for name in base if base[name] != again[name]]
    assert not unlike, f"{kind}: two runs of one file differ: {unlike}"
    found = {}
    for key, field in keys_of(kind).items():
        if keys.search(key):
            found[key] = outcome(base, observed(folder, words_of(kind, key, field, run), "changed"), key)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="NAME")
    parser.add_argument("--keys", default=".", type=re.compile, metavar="REGEX")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # suppress a deepspeed message
    for name in PRELOADED:
        importlib.import_module(name)
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="silent-keys-") as folder:
            print(json.dumps({"kind": kind, "keys": of_kind(kind, Path(folder), args.keys)}), flush=True)


if __name__ == "__main__":
    main()
