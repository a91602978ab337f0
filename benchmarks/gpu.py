"""lockstep on one GPU beside the ways people train the same job: one command, one table, one JSON.

In: a GPU; --wheels FOLDER installs from a folder of wheels first, where the machine has no packages. Out: in
--out, `gpu.json` and `gpu.md`, written anew after each process: for each job and contender the rate (median over
interleaved rounds, least and most), seconds to the first step (first round, later rounds), memory, MFU; the ratios that
issue 18 asks for; and whether the weights have the bits of one process at 2 and 4 processes that share the GPU, under
ddp and fsdp2, and after a stop. Whatever no time is left for is named, not left out.

    python benchmarks/gpu.py                                   # all jobs, within --budget seconds (520)
    python benchmarks/gpu.py --old 80d6daf1                    # beside an older build: a git revision, or its folder
    python benchmarks/gpu.py --jobs gpt2,lora --layers 16      # some of the jobs; layers of the 8B model
    python benchmarks/gpu.py --jobs bits                       # only the comparison of weights
    python benchmarks/gpu.py --tiny                            # the same code on a CPU: NOT a GPU figure

Data are words at random and weights are drawn, so nothing is downloaded. MFU is 6N + 12 layers x width x length
operations a token, over the card's dense bf16 rate as its maker gives it (docs/how-to/on-a-gpu.md).

Code of a whole micro-batch takes a minute or more to compile for the first time, so one call of nine minutes reaches
the first contenders of each job and few rounds. For medians, three calls: `--jobs gpt2,bits`, `--jobs llama,lora,qlora`
and `--jobs classes,minilm,minilm-bf16`. A machine that has no .git cannot export a revision: give --old a folder
(`git archive 80d6daf1 | tar -x -C old`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).with_name("gpu_peers.py")
RATES = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, from the maker's data sheet
NOT_A_FIGURE = "NOT A GPU FIGURE: tiny jobs on a CPU, which show that this benchmark works and nothing else"
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SEP = "; "
NEEDED = ("torch", "transformers", "tokenizers", "datasets", "safetensors", "huggingface-hub", "pyarrow", "numpy")
NEEDED += ("pydantic", "typing-extensions", "pyyaml", "rich", "jinja2")  # lockstep's requirements
NEEDS = {"trainer_liger": "liger_kernel", "accelerate": "accelerate"}
OURS = ("lockstep", "old")
WARM_UP = 2  # steps before the measurement
HEAD = "| job | contender | a second | least to most | MFU | first step, s: first round, later | whole, s | GB held |"


@dataclass(frozen=True)
class Job:
    """A training job. `length`: tokens per block; for classification, of the longest text."""

    name: str
    type: str
    config: dict[str, Any]
    length: int
    batch: int
    contenders: tuple[str, ...]
    micro_batches: int = 4
    steps: int = 12
    labels: int = 0  # 0: a language model on packed blocks
    precision: str = "bf16"
    vocabulary: int = 50257
    adapter: dict[str, Any] = field(default_factory=dict)
    quantization: str = ""  # of the frozen weights below an adapter
    device: str = "cuda"


GPT2 = {"n_positions": 1024, **NO_DROPOUT}
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
WHOLE = "lockstep:model.compile=whole"
GRAPHS = f"{WHOLE},model.cuda_graphs=true"
NOTES = ("runs uncompiled", "runs without CUDA graphs")  # of lockstep, if an option is not what was measured
OF_LANGUAGE = (WHOLE, "old", "lockstep", "loop_compiled", "trainer", "trainer_liger")
OF_ADAPTERS = (WHOLE, "old", "lockstep", "trainer", "trainer_liger", "trainer_compiled")
OF_QUANTIZED = ("lockstep", "trainer", "trainer_liger", "old", "trainer_compiled")
OF_TEXTS = ("lockstep", GRAPHS, "accelerate", WHOLE, "old")
VARIANTS = tuple(f"{WHOLE},{key}" for key in ("micro_batches=1", "micro_batches=8", "strategy.exact=false"))
JOBS = (
    Job("gpt2", "gpt2", GPT2, 1024, 32, (*OF_LANGUAGE, GRAPHS, "loop", *VARIANTS, "lockstep:model.compile=true")),
    Job("llama", "llama", LLAMA, 2048, 16, (*OF_LANGUAGE, GRAPHS), steps=8),
    Job("classes", "gpt2", GPT2, 64, 16, ("lockstep", GRAPHS, "trainer", WHOLE, "old", "loop"), 2, 60, labels=6),
    Job("minilm", "bert", MINILM, 64, 128, OF_TEXTS, 2, 40, labels=6, precision="fp32"),
    Job("minilm-bf16", "bert", MINILM, 64, 128, OF_TEXTS, 2, 40, labels=6),
    Job("lora", "llama", EIGHT_B, 2048, 8, OF_ADAPTERS, steps=8, adapter=LORA),
    Job("qlora", "llama", EIGHT_B, 2048, 8, OF_QUANTIZED, steps=8, adapter=LORA, quantization="nf4"),
)
BITS = Job("bits", "gpt2", GPT2 | {"n_layer": 4}, 256, 16, (), steps=60)
TRAINERS = ("trainer", "trainer_liger", "trainer_compiled")
TARGETS = (  # of issue 18: job, contender, the best of, at least this ratio of rates (`whole_s`: of seconds)
    ("gpt2", WHOLE, ("loop_compiled",), 0.95, "rate"),
    ("gpt2", WHOLE, ("old",), 3.0, "rate"),
    ("gpt2", VARIANTS[1], (VARIANTS[0],), 0.97, "rate"),
    ("gpt2", WHOLE, (VARIANTS[2],), 0.95, "rate"),
    ("llama", WHOLE, ("loop_compiled",), 0.95, "rate"),
    ("llama", WHOLE, ("trainer_liger",), 1.2, "rate"),
    ("classes", "lockstep", ("trainer",), 1.5, "rate"),
    ("classes", "lockstep", ("trainer",), 1.5, "whole_s"),
    *((job, name, ("accelerate",), 2.0, "rate") for job in ("minilm", "minilm-bf16") for name in ("lockstep", GRAPHS)),
    ("lora", WHOLE, TRAINERS, 0.95, "rate"),
    ("qlora", "lockstep", TRAINERS, 0.95, "rate"),
    *((job, "lockstep", ("trainer",), 1 / 1.2, "first_s") for job in ("gpt2", "llama", "classes", "lora", "qlora")),
)
SMALL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "max_position_embeddings": 32},
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}


def tiny(job: Job) -> Job:
    """Shrink a job for a CPU, without compilation, which takes minutes there."""
    some = tuple(name for name in job.contenders if "compile" not in name and "liger" not in name)
    return replace(
        job,
        config=job.config | SMALL[job.type],
        length=32,
        batch=8,
        steps=30 if job.name == "bits" else 5,
        vocabulary=503,
        device="cpu",
        contenders=some,
    )


# -- data -------------------------------------------------------------------------------------------------------------


def prepare(job: Job, folder: Path) -> None:
    """Write a word-level tokenizer, texts for lockstep, the same texts as tokens for peers, and a model to adapt."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<eos>"]
    words = [*special, *(f"w{i}" for i in range(job.vocabulary - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
    wrapped.save_pretrained(folder / "tokenizer")
    draw, count = random.Random(0), job.batch * (8 if job.labels else 4)
    rows = []
    for _ in range(count):
        length = draw.randint(5, job.length - 2) if job.labels else job.length - 1  # a text ends with one more token
        rows.append([draw.randrange(len(special), job.vocabulary) for _ in range(length)])
    tokens = [{"input_ids": ids if job.labels else [*ids, 2]} for ids in rows]
    texts = [{"text": " ".join(words[i] for i in ids)} for ids in rows]
    if job.labels:
        labels = [draw.randrange(job.labels) for _ in rows]
        tokens = [row | {"label": label} for row, label in zip(tokens, labels, strict=True)]
        texts = [row | {"label": f"c{label}"} for row, label in zip(texts, labels, strict=True)]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    for split, some in (("train", texts), ("validation", texts[: job.batch])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    if job.adapter:
        _save_model(job, folder)


def _save_model(job: Job, folder: Path) -> None:
    """Save a model with random weights, as the base of an adapter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(job.type, **job.config, vocab_size=job.vocabulary, pad_token_id=0)
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")


def run_file(job: Job, folder: Path, output: Path) -> Path:
    """Run file of a job for lockstep."""
    task: dict[str, Any] = {"name": "classification"}
    if not job.labels:
        task = {"name": "language_modeling", "block_size": job.length, "samples": 0}
    model: dict[str, Any] = {"type": job.type, "config": job.config}
    if job.adapter:
        model = {"source": str(folder / "model"), "adapter": {"type": "lora", **job.adapter}}
        model |= {"quantization": job.quantization} if job.quantization else {}
    run = {
        "name": job.name,
        "output": str(output),
        "task": task,
        "data": {"source": str(folder), **({"max_length": job.length} if job.labels else {})},
        "model": model,
        "tokenizer": {"source": str(folder / "tokenizer")},
        "steps": job.steps,
        "batch_size": job.batch,
        "micro_batches": job.micro_batches,
        "precision": job.precision,
        "optim": {"learning_rate": 5e-4, "max_grad_norm": 1.0},
        "strategy": {"name": "single"},
        "checkpoint": {"every": 0},
        "evaluate": {"every": 0, "limit": 2},
        "launch": {"device": job.device},
        "track": {"every": 1},
    }
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(run))  # JSON is valid YAML
    return path


# -- one process ------------------------------------------------------------------------------------------------------


def environment(source: Path, scratch: Path) -> dict[str, str]:
    """Environment of a contender: lockstep from `source`, separate caches, no network."""
    paths = [source / "src", *sorted((source / "packages").glob("*/src"))]
    own = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(scratch / "cache" / hashlib.sha256(str(source).encode()).hexdigest()[:8]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_DISABLED": "true",
    }
    return os.environ | own


def lockstep(
    job: Job, folder: Path, scratch: Path, source: Path, keys: Sequence[str], timeout: float, stop_at: int | None = None
) -> dict[str, Any]:
    """Run `lockstep train` once. `stop_at`: interrupt it after this many steps, and start it again."""
    output = Path(tempfile.mkdtemp(dir=scratch)) / "out"
    command = [sys.executable, "-m", "lockstep", "train", str(run_file(job, folder, output)), *keys]
    own, began = environment(source, scratch), time.time()
    try:
        first = _started(command, own, output, began + timeout, stop_at)
        stopped_after = len(_lines(output))
        if stop_at is not None and stopped_after < job.steps:
            _started(command, own, output, began + timeout)
    except TimeoutError:
        return {"unfinished": f"no end after {timeout:.0f} s, when time was up"}
    lines, weights = _lines(output), _weights(output)
    if not weights or first is None:
        return {"error": output.with_suffix(".log").read_text()[-500:] or "it printed nothing"}
    log = output.with_suffix(".log").read_text()
    return {
        "notes": [line.strip() for line in log.splitlines() if any(note in line for note in NOTES)],
        "seconds": [line["seconds_per_step"] for line in lines],
        "first_s": first,
        "whole_s": time.time() - began,
        "held_gb": _held(output),
        "weights": weights,
        "stopped_after": stopped_after,
    }


def _started(
    command: list[str], own: dict[str, str], output: Path, ends: float, stop_at: int | None = None
) -> float | None:
    """Run a command to its end; return the seconds to its first step, None if there was none. Errors: `TimeoutError`
    at the time `ends`, after which nothing of it runs any more."""
    began, first = time.time(), None
    with output.with_suffix(".log").open("a") as into:
        child = subprocess.Popen(command, env=own, stdout=into, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while child.poll() is None:
                steps = len(_lines(output))
                first = time.time() - began if first is None and steps else first
                if stop_at is not None and steps >= stop_at:
                    child.send_signal(signal.SIGINT)
                    stop_at = None
                if time.time() > ends:
                    raise TimeoutError
                time.sleep(0.02)
        finally:
            _kill_group(child)
    return first


def _kill_group(child: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started, such as ranks, which would keep the GPU busy."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _lines(output: Path) -> list[dict[str, Any]]:
    """Training lines so far; the last one may be incomplete."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [row for row in rows if row.get("split") == "train"]


def _held(output: Path) -> float | None:
    """Peak GPU memory of one rank's tensors in GiB, as for peers; None if not recorded."""
    path = output / "system.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    held = [value for row in rows for name, value in row.items() if name.startswith("gpu_memory_gb")]
    return max(held) * 1e9 / 2**30 if held else None


def _weights(output: Path) -> str | None:
    """SHA-256 of the exported weights, or None."""
    files = sorted((output / "export").glob("*.safetensors"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return digest[:16] if files else None


def peer(job: Job, folder: Path, scratch: Path, name: str, timeout: float) -> dict[str, Any]:
    """Run `gpu_peers.py` once."""
    here = Path(tempfile.mkdtemp(dir=scratch))
    (here / "job.json").write_text(json.dumps(asdict(job) | {"folder": str(folder)}))
    command = [sys.executable, str(PEERS), str(here / "job.json"), name, str(here / "out.json")]
    own = environment(ROOT, scratch) | {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    try:
        _started(command, own, here / "out", time.time() + timeout)
    except TimeoutError:
        return {"unfinished": f"no end after {timeout:.0f} s, when time was up"}
    if not (here / "out.json").exists():
        return {"error": (here / "out.log").read_text()[-500:] or "it printed nothing"}
    told: dict[str, Any] = json.loads((here / "out.json").read_text())
    return told


# -- all of it --------------------------------------------------------------------------------------------------------


class Bench:
    """Runs contenders in turns, round by round, until all rounds are done or time is up."""

    def __init__(
        self, jobs: Sequence[Job], old: Path | None, budget: float, scratch: Path, save: Callable[[Bench], None]
    ) -> None:
        """`save`: called with this object after each process."""
        self.jobs, self.old, self.scratch, self.save = jobs, old, scratch, save
        self.ends = time.time() + budget
        self.rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.left_out: dict[str, str] = {}
        self.notes: dict[str, str] = {}  # of runs that did without an option
        self.bits: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds left."""
        return self.ends - time.time()

    def folder(self, job: Job) -> Path:
        """Folder of a job's data, created on first use."""
        folder = self.scratch / job.name
        if not folder.exists():
            folder.mkdir()
            prepare(job, folder)
        return folder

    def compare_bits(self, job: Job, also: Sequence[str] = ()) -> None:
        """Compare the bits of one process with all jobs that must be equal. `also`: keys for all of them."""
        variants: dict[str, tuple[tuple[str, ...], int | None]] = {
            "single": ((), None),
            "single again": ((), None),
            "ddp, 2 processes": (("strategy.name=ddp", *_sharing(2, job)), None),
            "fsdp2, 2 processes": (("strategy.name=fsdp2", *_sharing(2, job)), None),
            "stopped and resumed": (("checkpoint.every=5",), 6),
            "ddp, 4 processes": (("strategy.name=ddp", *_sharing(4, job)), None),
            "fsdp2, 4 processes": (("strategy.name=fsdp2", *_sharing(4, job)), None),
        }
        if also:
            graphs = "model.cuda_graphs=true"
            variants |= {
                "CUDA graphs": ((graphs,), None),
                "CUDA graphs, ddp, 2 processes": ((graphs, "strategy.name=ddp", *_sharing(2, job)), None),
            }
        for name, (keys, stop_at) in variants.items():
            if self.left() < 0:
                self.left_out[f"bits: {name}"] = "no time was left"
                continue
            timeout = max(60.0, self.left())
            told = lockstep(job, self.folder(job), self.scratch, ROOT, [*keys, *also], timeout, stop_at)
            if "unfinished" in told:
                self.left_out[f"bits: {name}"] = told["unfinished"]
                continue
            if stop_at is not None and told.get("stopped_after", 0) >= job.steps:
                told = {"error": "it had ended before it was stopped"}
            self._note(f"bits: {name}", told)
            self.bits[SEP.join([name, *also])] = told.get("weights") or {"error": told["error"]}
            self.save(self)

    def measure(self, rounds: int) -> None:
        """Measure all rounds, in each of them the first contender of every job before the second of any; errors and
        skipped jobs are recorded."""
        for _ in range(rounds):
            for names in zip_longest(*(job.contenders for job in self.jobs)):
                for job, name in zip(self.jobs, names, strict=True):
                    if name is not None:
                        self._turn(job, name)

    def _turn(self, job: Job, name: str) -> None:
        where = f"{job.name}: {name}"
        turns = self.rounds.setdefault((job.name, name), [])
        kind, _, keys = name.partition(":")
        if any("error" in told for told in turns):
            return
        if kind == "old" and self.old is None:
            self.left_out[where] = "--old names no older build"
            return
        if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
            self.left_out[where] = f"{NEEDS[kind]} is not installed"
            return
        needed = ["peft"] * bool(job.adapter) + ["bitsandbytes"] * bool(job.quantization)
        if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
            self.left_out[where] = f"{lacking[0]} is not installed"
            return
        expected = max((told["took_s"] for told in turns), default=0.0)
        if self.left() < expected:
            self.left_out.setdefault(where, f"no time was left for more than {len(turns)} rounds")
            return
        began = time.time()
        timeout = max(30.0, self.left())
        if kind in OURS:
            source = ROOT if kind == "lockstep" else self.old
            assert source is not None
            told = lockstep(job, self.folder(job), self.scratch, source, keys.split(",") if keys else [], timeout)
        else:
            told = peer(job, self.folder(job), self.scratch, kind, timeout)
        if "unfinished" in told:
            self.left_out[where] = told["unfinished"]
            self.save(self)
            return
        turns.append(told | {"took_s": time.time() - began})
        self._note(where, told)
        self.save(self)
        print(f"{where}: {told.get('error') or f'{rate(job, told):,.0f} a second'}", file=sys.stderr, flush=True)

    def _note(self, where: str, told: dict[str, Any]) -> None:
        if told.get("notes"):
            self.notes[where] = "; ".join(told["notes"])

    def rows(self, card: str) -> Iterator[dict[str, Any]]:
        """Lines of the table."""
        for job in self.jobs:
            for name in job.contenders:
                turns = [told for told in self.rounds.get((job.name, name), []) if "error" not in told]
                if not turns:
                    continue
                rates = [rate(job, told) for told in turns]
                yield {
                    "job": job.name,
                    "contender": name,
                    "unit": "examples" if job.labels else "tokens",
                    "rate": statistics.median(rates),
                    "least": min(rates),
                    "most": max(rates),
                    "rounds": len(rates),
                    "mfu": mfu(job, statistics.median(rates), card),
                    "first_s": turns[0]["first_s"],
                    "later_first_s": statistics.median([told["first_s"] for told in turns[1:]] or [0]) or None,
                    "whole_s": statistics.median(told["whole_s"] for told in turns),
                    "held_gb": turns[-1]["held_gb"],
                }

    def told(self, card: str) -> dict[str, Any]:
        """Everything measured so far."""
        named = {"left_out": self.left_out, "errors": self.errors(), "notes": self.notes}
        return {"rows": list(self.rows(card)), "bits": self.bits, **named}

    def errors(self) -> dict[str, str]:
        """Failed jobs."""
        return {
            f"{job}: {name}": told["error"]
            for (job, name), turns in self.rounds.items()
            for told in turns
            if "error" in told
        }


def rate(job: Job, told: dict[str, Any]) -> float:
    """Tokens of blocks or examples per second, by the median step."""
    seconds = statistics.median(told["seconds"][WARM_UP:] or told["seconds"])
    return job.batch * (1 if job.labels else job.length) / seconds


def mfu(job: Job, tokens_per_s: float, card: str) -> float | None:
    """Share of the card's rate; None if unknown, or for anything but a full training of a language model."""
    peak = next((peak for name, peak in RATES.items() if name in card), None)
    if peak is None or job.labels or job.adapter:
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(job.type, **job.config, vocab_size=job.vocabulary)
    with torch.device("meta"):
        numbers = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    work = 6 * numbers + 12 * config.num_hidden_layers * config.hidden_size * job.length
    return work * tokens_per_s / peak


def table(result: dict[str, Any]) -> str:
    """Format as Markdown."""
    lines = [f"# {result['card']}", ""]
    if result["tiny"]:
        lines += [f"**{NOT_A_FIGURE}**", ""]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [f"{versions}; {result['took_s']:.0f} s in all.", ""]
    if absent := [name for name, there in result.get("machine", {}).items() if not there]:
        lines += [f"Not on this machine: {', '.join(absent)}.", ""]
    lines += [HEAD, "|---|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        share = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        later = "" if row["later_first_s"] is None else f", {row['later_first_s']:.1f}"
        held = "" if row["held_gb"] is None else f"{row['held_gb']:.1f}"
        lines.append(
            f"| {row['job']} | {row['contender']} | {row['rate']:,.0f} {row['unit']} | "
            f"{row['least']:,.0f} to {row['most']:,.0f} ({row['rounds']}) | {share} | {row['first_s']:.1f}{later} | "
            f"{row['whole_s']:.1f} | {held} |"
        )
    if reached := list(ratios(result["rows"])):
        lines += ["", "| job | contender | over | ratio | target | |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {job} | {name} | {best} | {ratio:.2f} ({of}) | {least:.2f} | {'met' if ratio >= least else 'missed'} |"
            for job, name, best, ratio, least, of in reached
        ]
    lines += ["", "| weights of | first 16 digits of SHA-256 | |", "|---|---|---|"]
    for name, weights in result["bits"].items():
        verdict = verdict_of(result["bits"], name)
        lines.append(f"| {name} | {'' if verdict == 'failed' else weights} | {verdict} |")
    for heading, named in (
        ("Left out", result["left_out"]),
        ("Failed", result["errors"]),
        ("Without an option", result.get("notes", {})),
    ):
        if named:
            lines += [
                "",
                f"{heading}:",
                *(f"- {where}: {why.strip().splitlines()[-1]}" for where, why in named.items()),
            ]
    return "\n".join(lines) + "\n"


def ratios(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str, float, float, str]]:
    """Targets whose contenders were measured: job, contender, the best other, ratio, least ratio, of what."""
    by_name = {(row["job"], row["contender"]): row for row in rows}
    for job, name, others, least, of in TARGETS:
        own = by_name.get((job, name))
        measured = [by_name[job, other] for other in others if (job, other) in by_name]
        if own is None or not measured:
            continue
        if of == "rate":
            best = max(measured, key=lambda row: row[of])
            yield job, name, best["contender"], own[of] / best[of], least, of
        else:
            best = min(measured, key=lambda row: row[of])
            yield job, name, best["contender"], best[of] / own[of], least, of


def verdict_of(bits: dict[str, Any], name: str) -> str:
    """Whether weights have the bits of the one process with the same keys."""
    one = bits.get(SEP.join(["single", *name.split(SEP)[1:]]))
    if isinstance(bits[name], dict):
        return "failed"
    if not isinstance(one, str):
        return "nothing to compare with"
    return "same" if bits[name] == one else "**OTHER**"


def _sharing(processes: int, job: Job) -> tuple[str, ...]:
    """Keys for processes that share one GPU."""
    keys = (f"launch.processes={processes}",)
    return keys if job.device == "cpu" else (*keys, f"launch.processes_per_gpu={processes}")


def facts() -> dict[str, Any]:
    """What compilation needs on a machine, and the packages that are beside it."""
    names = ("triton", "liger_kernel", "peft", "bitsandbytes", "flash_attn_interface")
    header = Path(sysconfig.get_path("include"), "Python.h")
    return {
        "C compiler": shutil.which(os.environ.get("CC", "gcc")) is not None,
        "Python.h": header.is_file(),
        **{name: importlib.util.find_spec(name) is not None for name in names},
    }


def old_build(given: str | None, scratch: Path) -> Path | None:
    """Folder of an older build: as given, or a git revision exported beside this one; None without it."""
    if given is None or Path(given).is_dir():
        return None if given is None else Path(given).resolve()
    folder = scratch / "old"
    folder.mkdir()
    words = ["git", "archive", given, "src", "packages"]
    archive = subprocess.run(words, cwd=ROOT, check=False, capture_output=True) if shutil.which("git") else None
    if archive is None or archive.returncode:
        why = "git is not installed" if archive is None else archive.stderr.decode().strip()
        print(f"--old {given}: {why}; give a folder with its src and packages", file=sys.stderr)
        return None
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def install(wheels: Path) -> None:
    """Install lockstep's requirements from a folder only, and whatever of the peers' is there."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*command, *NEEDED], check=True)
    for name in ("accelerate", "peft", "liger_kernel", "bitsandbytes", "nvidia-ml-py"):
        if subprocess.run([*command, name], check=False, capture_output=True).returncode:
            print(f"{name} is not among the wheels", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(job.name for job in JOBS), help="some of the jobs, and `bits`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=520.0, help="seconds after which no process is started")
    parser.add_argument("--layers", type=int, default=4, help="of the 8B model, which has 32")
    parser.add_argument("--old", help="git revision or folder of an older build")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install from")
    parser.add_argument("--tiny", action="store_true", help="small jobs on a CPU: not a GPU figure")
    parser.add_argument("--no-bits", action="store_true", help="leave out the comparison of weights")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    asked = parser.parse_args()
    began = time.time()
    if asked.wheels:
        install(asked.wheels)
    import torch
    import transformers

    if not asked.tiny and not torch.cuda.is_available():
        parser.error("no GPU is visible; --tiny tries this benchmark on a CPU, which measures nothing")
    card = "CPU" if asked.tiny else torch.cuda.get_device_name()
    jobs = [job for job in JOBS if job.name in asked.jobs.split(",")]
    unknown = set(asked.jobs.split(",")) - {job.name for job in JOBS} - {BITS.name}
    if unknown:
        parser.error(
            f"--jobs: unknown {', '.join(sorted(unknown))}; expected some of {', '.join(j.name for j in JOBS)}"
        )
    jobs = [replace(j, config=j.config | {"num_hidden_layers": asked.layers}) if j.adapter else j for j in jobs]
    bits = BITS
    if asked.tiny:
        jobs, bits = [tiny(job) for job in jobs], tiny(bits)
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {
        "card": card,
        "tiny": asked.tiny,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": facts(),
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)

        def save(bench: Bench) -> None:
            result = about | {"took_s": time.time() - began} | bench.told(card)
            (asked.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
            (asked.out / "gpu.md").write_text(table(result))

        bench = Bench(jobs, old_build(asked.old, scratch), asked.budget - (time.time() - began), scratch, save)
        bench.measure(1)
        if not asked.no_bits:
            compiled = () if asked.tiny else ("model.compile=whole",)
            for keys in dict.fromkeys((compiled, ())):
                bench.compare_bits(bits, keys)
        bench.measure(asked.rounds - 1)
        save(bench)
    print((asked.out / "gpu.md").read_text())
    sys.exit(1 if any(verdict_of(bench.bits, name) != "same" for name in bench.bits) or bench.errors() else 0)


if __name__ == "__main__":
    main()
