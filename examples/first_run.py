"""Train a small classifier on a csv file, ask it, and look at its scores. `python examples/first_run.py`, a minute.

Also as a notebook: `first_run.ipynb`, which `python docs/notebooks.py` makes of this file.
"""

import csv
import random
from pathlib import Path

import lockstep

WORDS = {"good": ["wonderful", "happy", "superb", "love"], "bad": ["sad", "broken", "angry", "boring"]}

# %% A csv file of 300 texts, with a label each
folder = Path("outputs/examples")
folder.mkdir(parents=True, exist_ok=True)
draw = random.Random(0)
with (folder / "reviews.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["review", "sentiment"])
    for _ in range(300):
        label = draw.choice(["good", "bad"])
        rows.writerow([" ".join(["the", "plot", "was", *draw.choices(WORDS[label], k=3)]), label])

# %% The run: a GPT-2 of one layer from scratch, on two processes
run = lockstep.Run.load(
    {
        "output": str(folder / "first-run"),
        "task": {"name": "classification", "text": "review", "label": "sentiment"},
        "data": {"source": str(folder / "reviews.csv"), "max_length": 16},
        "model": {"type": "gpt2", "config": {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 16}},
        "tokenizer": {"train": "wordlevel"},
        "epochs": 4,
        "batch_size": 32,  # examples a step, over all processes
        "micro_batches": 4,  # pieces of a step, which the processes share out
        "optim": {"learning_rate": 5e-3},
        "launch": {"device": "cpu", "threads": 1, "processes": 2},
    }
)
result = lockstep.train(run, show=None)

# %% How good it is, and two answers
print("validation accuracy", result.metrics["validation"]["accuracy"])
for answer in lockstep.predict(result, ["the plot was superb", "the plot was boring"]):
    print(answer["review"], "->", answer["label"])
