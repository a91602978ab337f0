"""The time from the command to the end of the first step, beside transformers' Trainer in its plainest script.

In: a pretrained model's folder, and one with train, validation and test .jsonl of texts and labels. Out: a table, and
each start as a line of JSON in --out. Each start is a process of its own that ends with its first step; the sides
alternate. Caches are filled by a start of each before them. One process, one thread, a batch of 32.
Example: python benchmarks/first_step.py MINILM EMOTION --precision bf16 --pairs 5 --out first-step.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK = "MEASURED "  # prefix of the line that a start prints
BEGAN = "BENCHMARK_BEGAN"  # variable with the time of the command, in seconds since the epoch


def reached() -> None:
    """Print the time since the command, and end the process."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(each.ru_utime + each.ru_stime for each in used)
    said = {"clock_s": round(time.time() - float(os.environ[BEGAN]), 3), "processor_s": round(processor, 3)}
    print(MARK + json.dumps(said), flush=True)
    os._exit(0)


def lockstep(model: str, data: str, precision: str, folder: str, *more: str) -> None:
    import lockstep.cli
    from lockstep.training import hooks

    hooks.StepHooks.after_step = lambda *_: reached()  # type: ignore[method-assign, assignment]
    values = {
        "task": {"name": "classification", "text": "text", "label": "label"},
        "data": {"source": data, "max_length": 128},
        "model": {"source": model},
        "batch_size": 32,
        "micro_batches": 1,
        "precision": precision,
        "launch": {"processes": 1, "threads": 1, "device": "cpu"},
        "output": f"{folder}/out",
    }
    Path(folder, "run.yaml").write_text(json.dumps(values))
    lockstep.cli.main(["train", f"{folder}/run.yaml", *more])


def trainer(model: str, data: str, precision: str, folder: str, *more: str) -> None:
    from datasets import load_dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class First(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            reached()

    files = {split: f"{data}/{split}.jsonl" for split in ("train", "validation", "test")}
    rows = load_dataset("json", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = rows.map(lambda some: tokenizer(some["text"], truncation=True, max_length=128), batched=True)
    labels = len(set(rows["train"]["label"]))
    made = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels),
        args=TrainingArguments(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=32,
            use_cpu=True,
            bf16=precision == "bf16",
            report_to="none",
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        callbacks=[First()],
    )
    made.train()


SIDES = {"lockstep": lockstep, "Trainer": trainer}


def once(side: str, words: list[str]) -> dict[str, float]:
    """Do one start in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", BEGAN: str(time.time())}
        command = [sys.executable, __file__, "--start", side, *words[:3], folder, *words[3:]]
        run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    line = next((line for line in run.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise SystemExit(f"a start of {side} ended with {run.returncode}: {run.stdout[-800:]}{run.stderr[-800:]}")
    measured: dict[str, float] = json.loads(line.removeprefix(MARK))
    return measured


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        SIDES[sys.argv[2]](*sys.argv[3:])
        raise SystemExit("the training ended before its first step")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("more", nargs="*", help="entries of lockstep's run file, as key=value")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    known = parser.parse_args()
    words = [known.model, known.data, known.precision]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for pair in range(-1, known.pairs):
        for side in list(SIDES)[:: 1 if pair % 2 else -1]:
            taken = once(side, words + (known.more if side == "lockstep" else []))
            if pair < 0:
                continue  # warm-up of the caches
            found[side].append(taken)
            if known.out is not None:
                line = {"date": time.strftime("%Y-%m-%d"), "pair": pair, "side": side, "precision": known.precision}
                with known.out.open("a") as file:
                    file.write(json.dumps(line | taken) + "\n")
    print("| to the end of the first step | lockstep | Trainer | lockstep / Trainer, by pairs |\n|---|---|---|---|")
    for name, key in (("clock, s", "clock_s"), ("processor time, s", "processor_s")):
        ours, theirs = ([each[key] for each in found[side]] for side in SIDES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {statistics.median(ours):.2f} | {statistics.median(theirs):.2f} | {shown} |")


if __name__ == "__main__":
    main()
