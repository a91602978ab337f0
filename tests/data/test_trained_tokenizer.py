"""Tokenizers that a run trains: every process and machine trains the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.marks import long
from support.places import TESTS_PATH

# Many pairs are equally frequent: the choice of the first merge is where trainings would differ.
TRAIN = """
import hashlib, json, sys
from lockstep.data import tokenizer
from support.harness import tiny
drawn = json.loads(sys.argv[2])
run = tiny(tokenizer={"train": sys.argv[1], "vocab_size": 700})
made = tokenizer._train(tokenizer.TokenizerChoice.of(run), iter([drawn]), False)
print(hashlib.sha256(made.backend_tokenizer.to_str().encode()).hexdigest())
"""
TEXTS = [
    f"w{i * 7919 % 1000:03d}{chr(97 + i % 26)}{chr(97 + i * 5 % 26)}{chr(97 + i * 11 % 26)} ende" for i in range(300)
]


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind", ["wordpiece", long("bpe"), long("wordlevel"), long("character")]
)  # a run notes that unigram is not reproducible
def test_processes_train_the_same_tokenizer(kind: str) -> None:
    """The library numbers WordPiece's first pieces in hash table order, which differs between processes."""
    environment = os.environ | {"PYTHONPATH": TESTS_PATH + os.pathsep + os.environ.get("PYTHONPATH", "")}
    environment.pop("PYTHONHASHSEED", None)
    words = [sys.executable, "-c", TRAIN, kind, json.dumps(TEXTS)]
    began = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    hashes = [process.communicate(timeout=200)[0].split()[-1] for process in began]
    assert len(set(hashes)) == 1
