"""lockstep on one GPU beside the ways people train the same job: one command, one table, one JSON.

In: a GPU; --wheels FOLDER installs from a folder of wheels first, where the machine has no packages. Out: in
--out, `gpu.json` and `gpu.md`: for each job and contender the rate (median over interleaved rounds, least and most),
seconds to the first step, memory, MFU; and whether the weights have the bits of one process at 2 and 4 processes that
share the GPU, under ddp and fsdp2, and after a stop. Whatever no time is left for is named, not left out.

    python benchmarks/gpu.py                                   # all jobs, within --budget seconds (520)
    python benchmarks/gpu.py --old 80d6daf1                    # beside an older build: a git revision, or its folder
    python benchmarks/gpu.py --jobs gpt2,lora --layers 16      # some of the jobs; layers of the 8B model
    python benchmarks/gpu.py --tiny                            # the same code on a CPU: NOT a GPU figure

Data are words at random and weights are drawn, so nothing is downloaded. MFU is 6N + 12 layers x width x length
operations a token, over the card's dense bf16 rate as its maker gives it (docs/how-to/on-a-gpu.md).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).with_name("gpu_peers.py")
RATES = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, from the maker's data sheet
NOT_A_FIGURE = "NOT A GPU FIGURE: tiny jobs on a CPU, which show that this benchmark works and nothing else"
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NEEDS = {"trainer_liger": "liger_kernel", "accelerate": "accelerate"}
OURS = ("lockstep", "old")
WARM_UP = 2  # steps before the measurement
HEAD = "| job | contender | a second | least to most | MFU | first step, s | whole, s | GB held |"


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
OF_LANGUAGE = (WHOLE, "old", "lockstep", "loop_compiled", "trainer", "trainer_liger")
OF_ADAPTERS = (WHOLE, "old", "lockstep", "trainer", "trainer_liger", "trainer_compiled")
VARIANTS = tuple(f"{WHOLE},{key}" for key in ("micro_batches=1", "micro_batches=8", "strategy.exact=false"))
JOBS = (
    Job("gpt2", "gpt2", GPT2, 1024, 32, (*OF_LANGUAGE, "loop", *VARIANTS, "lockstep:model.compile=true")),
    Job("llama", "llama", LLAMA, 2048, 16, OF_LANGUAGE, steps=8),
    Job("classes", "gpt2", GPT2, 64, 16, ("lockstep", "old", "trainer", "loop"), 2, 60, labels=6),
    Job("minilm", "bert", MINILM, 64, 128, ("lockstep", "old", "accelerate"), 2, 40, labels=6, precision="fp32"),
    Job("minilm-bf16", "bert", MINILM, 64, 128, ("lockstep", "old", "accelerate"), 2, 40, labels=6),
    Job("lora", "llama", EIGHT_B, 2048, 8, OF_ADAPTERS, steps=8, adapter=LORA),
)
BITS = Job("bits", "gpt2", GPT2 | {"n_layer": 4}, 256, 16, (), steps=30)
SMALL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
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
        "XDG_CACHE_HOME": str(scratch / "cache"),
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
    began, first, log = time.time(), None, output.with_suffix(".log")
    with log.open("w") as into:
        child = subprocess.Popen(command, env=environment(source, scratch), stdout=into, stderr=subprocess.STDOUT)
        while child.poll() is None:
            if first is None and _lines(output):
                first = time.time() - began
            if stop_at is not None and len(_lines(output)) >= stop_at:
                child.send_signal(signal.SIGINT)
                stop_at = None
            if time.time() - began > timeout:
                child.kill()
                child.wait()
                return {"error": f"no end after {timeout:.0f} s"}
            time.sleep(0.02)
    stopped_after = len(_lines(output))
    if stop_at is None and stopped_after < job.steps and not _weights(output):
        with log.open("a") as into:
            subprocess.run(command, env=environment(source, scratch), stdout=into, stderr=subprocess.STDOUT)
    lines, weights = _lines(output), _weights(output)
    if not weights:
        return {"error": log.read_text()[-500:]}
    return {
        "seconds": [line["seconds_per_step"] for line in lines],
        "first_s": first,
        "whole_s": time.time() - began,
        "held_gb": _held(output),
        "weights": weights,
        "stopped_after": stopped_after,
    }


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
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {timeout:.0f} s"}
    if not (here / "out.json").exists():
        return {"error": (done.stderr or done.stdout)[-500:]}
    told: dict[str, Any] = json.loads((here / "out.json").read_text())
    return told


# -- all of it --------------------------------------------------------------------------------------------------------


class Bench:
    """Runs contenders in turns, round by round, until all rounds are done or time is up."""

    def __init__(self, jobs: Sequence[Job], old: Path | None, budget: float, scratch: Path) -> None:
        self.jobs, self.old, self.scratch = jobs, old, scratch
        self.ends = time.time() + budget
        self.rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.left_out: dict[str, str] = {}
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
        variants = {
            "single": ((), None),
            "single again": ((), None),
            "ddp, 2 processes": (("strategy.name=ddp", "launch.processes=2"), None),
            "fsdp2, 2 processes": (("strategy.name=fsdp2", "launch.processes=2"), None),
            "stopped and resumed": (("checkpoint.every=5",), 6),
            "ddp, 4 processes": (("strategy.name=ddp", "launch.processes=4"), None),
            "fsdp2, 4 processes": (("strategy.name=fsdp2", "launch.processes=4"), None),
        }
        for name, (keys, stop_at) in variants.items():
            if self.left() < 0:
                self.left_out[f"bits: {name}"] = "no time was left"
                continue
            timeout = max(60.0, self.left())
            told = lockstep(job, self.folder(job), self.scratch, ROOT, [*keys, *also], timeout, stop_at)
            if stop_at is not None and told.get("stopped_after", 0) >= job.steps:
                told = {"error": "it had ended before it was stopped"}
            self.bits[" ".join([name, *also])] = told.get("weights") or {"error": told["error"]}

    def measure(self, rounds: int) -> None:
        """Measure all rounds; errors and skipped jobs are recorded."""
        for _ in range(rounds):
            for job in self.jobs:
                for name in job.contenders:
                    self._turn(job, name)

    def _turn(self, job: Job, name: str) -> None:
        where = f"{job.name}: {name}"
        turns = self.rounds.setdefault((job.name, name), [])
        kind, _, keys = name.partition(":")
        if any("error" in told for told in turns) or (kind == "old" and self.old is None):
            return
        if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
            self.left_out[where] = f"{NEEDS[kind]} is not installed"
            return
        if job.adapter and importlib.util.find_spec("peft") is None:
            self.left_out[where] = "peft is not installed"
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
        turns.append(told | {"took_s": time.time() - began})
        print(f"{where}: {told.get('error') or f'{rate(job, told):,.0f} a second'}", file=sys.stderr, flush=True)

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
                    "first_s": statistics.median(told["first_s"] for told in turns),
                    "whole_s": statistics.median(told["whole_s"] for told in turns),
                    "held_gb": turns[-1]["held_gb"],
                }

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
    lines += [f"{versions}; {result['took_s']:.0f} s in all.", "", HEAD, "|---|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        share = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        held = "" if row["held_gb"] is None else f"{row['held_gb']:.1f}"
        lines.append(
            f"| {row['job']} | {row['contender']} | {row['rate']:,.0f} {row['unit']} | "
            f"{row['least']:,.0f} to {row['most']:,.0f} ({row['rounds']}) | {share} | {row['first_s']:.1f} | "
            f"{row['whole_s']:.1f} | {held} |"
        )
    lines += ["", "| weights of | first 16 digits of SHA-256 | |", "|---|---|---|"]
    single = result["bits"].get("single")
    for name, weights in result["bits"].items():
        failed = isinstance(weights, dict)
        verdict = "failed" if failed else "same" if weights == single else "**OTHER**"
        lines.append(f"| {name} | {'' if failed else weights} | {verdict} |")
    for heading, named in (("Left out", result["left_out"]), ("Failed", result["errors"])):
        if named:
            lines += [
                "",
                f"{heading}:",
                *(f"- {where}: {why.strip().splitlines()[-1]}" for where, why in named.items()),
            ]
    return "\n".join(lines) + "\n"


def old_build(given: str | None, scratch: Path) -> Path | None:
    """Folder of an older build: as given, or a git revision exported beside this one."""
    if given is None or Path(given).is_dir():
        return None if given is None else Path(given).resolve()
    folder = scratch / "old"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", given, "src", "packages"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def install(wheels: Path) -> None:
    """Install lockstep's and the peers' requirements from a folder only."""
    names = ["torch", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "pydantic", "pyyaml", "numpy"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*command, *names], check=True)
    for name in ("liger_kernel", "bitsandbytes"):  # optional peers
        subprocess.run([*command, name], check=False, capture_output=True)


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
    unknown = set(asked.jobs.split(",")) - {job.name for job in JOBS}
    if unknown:
        parser.error(
            f"--jobs: unknown {', '.join(sorted(unknown))}; expected some of {', '.join(j.name for j in JOBS)}"
        )
    jobs = [replace(j, config=j.config | {"num_hidden_layers": asked.layers}) if j.adapter else j for j in jobs]
    bits = BITS
    if asked.tiny:
        jobs, bits = [tiny(job) for job in jobs], tiny(bits)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        bench = Bench(jobs, old_build(asked.old, scratch), asked.budget - (time.time() - began), scratch)
        bench.measure(1)
        if not asked.no_bits:
            compiled = () if asked.tiny else ("model.compile=whole",)
            for keys in dict.fromkeys((compiled, ())):
                bench.compare_bits(bits, keys)
        bench.measure(asked.rounds - 1)
        result = {
            "card": card,
            "tiny": asked.tiny,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "took_s": time.time() - began,
            "rows": list(bench.rows(card)),
            "bits": bench.bits,
            "left_out": bench.left_out,
            "errors": bench.errors(),
        }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (asked.out / "gpu.md").write_text(table(result))
    print(table(result))
    other = [name for name, weights in result["bits"].items() if weights != result["bits"]["single"]]
    sys.exit(1 if other or result["errors"] else 0)


if __name__ == "__main__":
    main()
