"""Fuzzer of user input: run files, rows and arguments. Seeded; each case runs in this process.

In: a seed. Out: cases and results: success, or status 2 with a message; anything else is a finding. By hand:
`PYTHONPATH=tests python -m support.fuzz SEED SECONDS`, where crashes and hangs are findings, too.
"""

import bz2
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from lockstep import cli
from lockstep.config import error_messages as messages
from lockstep.config.run import Run
from lockstep.launchers import local
from support.harness import TINY, tiny

RUN = TINY | {"name": "fuzzed", "output": "out", "launch": {"device": "cpu", "threads": 1, "processes": 1}}
KINDS = ("run", "text", "rows", "words")
START_S = 120  # for imports, on a busy machine
LIMIT_S = 60
DEEP = 30_000


def _words(text: str) -> list[str]:
    return text.split()


# values that hardly any key expects
TEXTS = (
    *("", " ", "a" * 5000, "9" * 5000, "\x00", "\ud800", "\u202e", "é", "😀"),
    *_words("null ~ ~nobody/x * [ ${HOME} $(id) ../x a/b a.b a.b.C . / - --help 0x10 1_000 1:30 1e400 nan = a=b"),
    *_words("s3:// https:// hf://x file:///x http://[ x.jsonl x.parquet x.csv.gz builtin/emotion builtin/x"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, -(10**30), 0.0, 0.5, -0.5, 1e308, 1e-320),
    *(float("nan"), float("inf"), [], {}, [None], [[]], [1, "a"], {"a": 1}, {"name": None}, {1: 2}, {None: None}),
    *([{}], [{"source": "x"}], {"source": {}}, {"": ""}, ["x"] * 50, b"\xff\x00", {"a": {"a": {"a": {}}}}),
)
# further YAML syntax
YAML = (
    *("&a [*a]", "&a {b: *a}", "!!python/object:os.system x", "!!binary x", "!!set {a, b}", "!!int x", "!!timestamp x"),
    *("<<: [1]", "? [a]\n: b", "? {a: b}\n: c", "\t", "%YAML 9.9\n---\n", "---\n---\n", "...\n", "'", '"\\ud800"'),
    *_words("*nobody | >- { } 0b2 0o9 1__ -.inf .nan 12:30:45 2020-13-45 2020-01-01T99:00:00Z = << y off"),
)


@dataclass
class Finding:
    """A result that is neither success nor a message."""

    case: str
    what: str


@dataclass
class Fuzz:
    """Cases in their own folder, which is emptied before each."""

    folder: Path
    seed: int
    findings: list[Finding] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)

    def run(self, number: int) -> None:
        """Run case `number` of this seed."""
        self.chance = random.Random(f"{self.seed}/{number}")
        kind = KINDS[number % len(KINDS)]
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "a/b").mkdir(parents=True)
        os.chdir(self.folder / "a/b")
        words = getattr(self, f"of_{kind}")()
        said, what, status = io.StringIO(), "", 0
        try:
            with redirect_stdout(said), redirect_stderr(said), alarm():
                status = cli.main(words)
        except SystemExit as caught:
            status = caught.code if isinstance(caught.code, int) else 1
        except BaseException:
            what = traceback.format_exc(limit=-6)
        self.said = text = said.getvalue()
        if not what and (status not in (0, 2) or "Traceback" in text or (status == 2 and not text.strip())):
            what = f"status {status}: {text[-1500:]}"
        if what:
            self.findings.append(Finding(f"{kind}, seed {self.seed}, case {number}: {[w[:200] for w in words]}", what))
        self.statuses[f"{kind} {status}"] = self.statuses.get(f"{kind} {status}", 0) + 1

    # -- input -------------------------------------------------------------------------------------------------------

    def value(self) -> Any:
        kind = self.chance.randrange(8)
        if kind < 3:
            return self.chance.choice(VALUES)
        if kind < 7:
            return self.chance.choice(TEXTS)
        return f"@{self.chance.choice((50, 300, 1500))}@"  # becomes that many nested lists

    def of_run(self) -> list[str]:
        """A run file with a few invalid values."""
        values = json.loads(json.dumps(RUN))
        own, every = sorted(messages.flat(tiny().model_dump())), sorted(messages.keys_of(Run))
        for _ in range(self.chance.choice((1, 1, 1, 2, 4))):
            *sections, last = self.chance.choice(own if self.chance.random() < 0.8 else every).split(".")
            if last in ("remote_dir", "push_to"):
                continue
            inner = values
            for section in sections:
                if not isinstance(inner.get(section), dict):
                    inner[section] = {}
                inner = inner[section]
            inner[last] = self.value()
        text = deepened(yaml.safe_dump(values, allow_unicode=self.chance.random() < 0.5))
        Path("run.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        return ["train", "run.yaml"]

    def of_text(self) -> list[str]:
        """A run file with a corrupted text."""
        text = yaml.safe_dump(RUN)
        content = text.encode()
        for _ in range(self.chance.choice((1, 1, 2, 5))):
            place = self.chance.randrange(len(content) + 1)
            new = self.chance.choice(
                (*YAML, *TEXTS, "[" * 3000, "{a: " * 3000, "- " * 3000, "\n", ":", ": ", " ", "#", "\ufeff")
            )
            raw = new.encode("utf-8", "surrogatepass") if self.chance.random() < 0.9 else os.urandom(0) + b"\xff\xfe"
            if self.chance.random() < 0.4:
                line = content.rfind(b": ", 0, place)
                place = line + 2 if line >= 0 else place
                end = content.find(b"\n", place)
                content = content[:place] + raw + content[end if end >= 0 else len(content) :]
            else:
                content = content[:place] + raw + content[place + self.chance.choice((0, 0, 1, 20)) :]
        Path("run.yaml").write_bytes(content)
        return ["train", "run.yaml"]

    def of_rows(self) -> list[str]:
        """A file of rows with something odd."""
        ending = self.chance.choice((".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet"))
        rows = [{"text": f"some words {i}", "label": i % 3} for i in range(self.chance.choice((1, 3, 40, 40, 40)))]
        content = getattr(self, f"_{ending[1:]}")(rows)
        if self.chance.random() < 0.3 and content:
            place = self.chance.randrange(len(content))
            content = self.chance.choice(
                (
                    content[:place],
                    content[:place] + b"\xff" + content[place:],
                    content[:place] + b"\x00" + content[place:],
                    b"\xef\xbb\xbf" + content,
                )
            )
        if self.chance.random() < 0.15:
            pack, more = self.chance.choice(((gzip.compress, ".gz"), (bz2.compress, ".bz2"), (gzip.compress, ".xz")))
            content, ending = pack(content)[: self.chance.choice((None, -4, 20))], ending + more
        Path(f"rows{ending}").write_bytes(content)
        Path("run.yaml").write_text(
            yaml.safe_dump(RUN | {"data": {"source": f"rows{ending}", "max_length": 32, "validation_fraction": 0.3}})
        )
        more_words = [
            "data.deduplicate=true",
            "data.decontaminate=true",
            "data.drop_missing=true",
            "task.name=language_modeling",
            "task.block_size=32",
        ]
        return ["train", "run.yaml", *(w for w in more_words if self.chance.random() < 0.15)]

    def _json_value(self) -> str:
        odd = (
            "9" * 400,
            "9" * 5000,
            "",
            '[1, "a"]',
            *_words('NaN Infinity 1e999 "\\ud800" "\\u0000" tru [] {} null -0 01'),
        )
        if self.chance.random() < 0.3:
            count = self.chance.choice((20, 200, 1500, DEEP))
            return self.chance.choice(("[" * count + "]" * count, '{"a": ' * count + "1" + "}" * count, "[" * count))
        if self.chance.random() < 0.5:
            return self.chance.choice(odd)
        return deepened(json.dumps(self.value(), default=str, skipkeys=True))

    def _jsonl(self, rows: list[dict[str, Any]]) -> bytes:
        lines = [json.dumps(row) for row in rows]
        for _ in range(self.chance.choice((1, 2, 3))):
            column = self.chance.choice(("text", "label", "other", "text.a", ""))
            line = f'{{"text": "x", "label": 1, {json.dumps(column)}: {self._json_value()}}}'
            lines[self.chance.randrange(len(lines))] = self.chance.choice((line, line, line, self._json_value()))
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    def _json(self, rows: list[dict[str, Any]]) -> bytes:
        inner = b",\n".join(self._jsonl(rows).split(b"\n"))
        whole = b"[" + inner + b"]"
        return self.chance.choice((whole, whole, whole, b'{"data": [' + inner + b"]}", inner))

    def _csv(self, rows: list[dict[str, Any]], between: str = ",") -> bytes:
        lines = [between.join(("text", "label")), *(f"{row['text']}{between}{row['label']}" for row in rows)]
        cells = (*TEXTS, '"', '"a', 'a"b"', "a,b", "\t", "\r", '""', ",", "x" * 200_000)
        for _ in range(self.chance.choice((1, 2))):
            cell = self.chance.choice(cells)
            lines[self.chance.randrange(len(lines))] = between.join([cell] * self.chance.choice((1, 2, 3)))
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    def _tsv(self, rows: list[dict[str, Any]]) -> bytes:
        return self._csv(rows, "\t")

    def _txt(self, rows: list[dict[str, Any]]) -> bytes:
        return self._csv(rows, ";")

    def _parquet(self, rows: list[dict[str, Any]]) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        odd: tuple[Any, ...] = (
            *([[1]] * len(rows), [None] * len(rows), [{"a": 1}] * len(rows), [b"\xff"] * len(rows)),
            *([float("nan")] * len(rows), [2**62] * len(rows), [True] * len(rows)),
        )
        columns = {"text": [row["text"] for row in rows], "label": [row["label"] for row in rows]}
        columns[self.chance.choice(("text", "label", "other"))] = self.chance.choice(odd)
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out)
        return out.getvalue()

    def of_words(self) -> list[str]:
        """A command line, without anything that would start a long job or use a network."""
        Path("run.yaml").write_text(yaml.safe_dump(RUN))
        Path("folder").mkdir()
        for name in ("run.yaml", "launch.json", "metrics.jsonl", "config.json", "export.json"):
            if self.chance.random() < 0.5:
                Path("folder", name).write_bytes(self._jsonl([{"step": 1, "split": "train"}] * 3))
        commands = _words("train train train status logs stop report predict evaluate diff schema list attest replay")
        words = [self.chance.choice(commands), *(["run.yaml"] if self.chance.random() < 0.4 else ["folder"])]
        keys = sorted(messages.keys_of(Run))
        for _ in range(self.chance.choice((0, 1, 1, 2, 3))):
            text = str(self.chance.choice((*TEXTS, *YAML, *map(str, VALUES)))).replace("\x00", "")
            key = self.chance.choice([key for key in keys if key not in ("remote_dir", "hub.push_to", "launch.name")])
            forms = (
                text,
                f"{key}={text}",
                f"--{key}={text}",
                f"--{key}",
                f"={text}",
                f"{key}.x={text}",
                f"--{text}",
                "--json",
                "--trust",
            )
            words.append(self.chance.choice(forms))
        if self.chance.random() < 0.1:
            words.insert(self.chance.randrange(len(words)), os.fsdecode(b"\xff\xfe"))
        return words


def deepened(text: str) -> str:
    """Insert the nested lists requested by `value`."""
    return re.sub("['\"]?@(\\d+)@['\"]?", lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


@contextmanager
def alarm() -> Any:
    """Make a case that takes longer than `LIMIT_S` a finding."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def without_ranks(patch: Callable[[Any, str, Any], None]) -> None:
    """Make `lockstep train` stop before it starts ranks."""
    patch(local.Local, "start", lambda *_: 0)
    patch(local, "prestart", lambda *_: None)


def _by_hand(seed: int, seconds: float) -> None:
    """Run cases in a child until time is up, resuming after a crash."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        left_s = until - time.monotonic()
        try:
            child = subprocess.run(
                [sys.executable, "-m", "support.fuzz", "--child", str(seed), str(number), str(left_s)],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                timeout=left_s + START_S + LIMIT_S,
            )
        except subprocess.TimeoutExpired as late:
            begun = (late.stdout or b"").split()
            print(f"FINDING: seed {seed} hangs in case {int(begun[-1]) if begun else number}", flush=True)
            return
        begun = child.stdout.split()
        number = int(begun[-1]) + 1 if begun else number + 1
        if child.returncode:
            print(f"FINDING: case {number - 1} of seed {seed} ended its process: {child.returncode}", flush=True)
    print(f"{number} cases of seed {seed}", flush=True)


def _child(seed: int, number: int, seconds: float) -> None:
    without_ranks(setattr)
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCKSTEP_CACHE"] = f"{folder}/cache"
        fuzz = Fuzz(Path(folder) / "case", seed)
        out = os.fdopen(os.dup(1), "w")
        while time.monotonic() < until:
            print(number, file=out, flush=True)
            fuzz.run(number)
            number += 1
            while fuzz.findings:
                found = fuzz.findings.pop()
                print(f"FINDING: {found.case}\n{found.what}", file=sys.stderr, flush=True)
        print(fuzz.statuses, file=sys.stderr, flush=True)
        print(number - 1, file=out, flush=True)
        os.chdir("/")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        with suppress(BrokenPipeError):
            _child(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        _by_hand(int(sys.argv[1]), float(sys.argv[2]))
