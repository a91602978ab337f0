"""CUDA without a GPU: a training step of every strategy on fake tensors that claim to be on `cuda`.

torch then refuses operators that mix devices, and the test records each operation for which the host would wait.
docs/how-to/on-a-gpu.md says what cannot be tested this way. On a GPU: test_gpu.py.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.config import plugins
from support import task_runs
from support.marks import long
from support.places import TESTS, TESTS_PATH

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),  # for all cases, which the first test runs
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has such a device already"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler"),
]
STEPS, MICRO_BATCHES = 2, 4  # the first step, and one that starts from its state
TREE = "strategy.all_reduce=hierarchical"
Waits = dict[str, int]  # what and where -> number of waits per step


class Case(NamedTuple):
    """One training case. Records the lines of lockstep (not of an engine) at which the host waits in each step."""

    name: str
    ranks: int
    rank: int = 0
    keys: tuple[str, ...] = ()
    waits: Waits = {}  # noqa: RUF012 - never written to
    kind: str | None = None  # of `task_runs` or `label_runs`; None: text classification
    micro_batches: int = MICRO_BATCHES


PADDED, UNPADDED, CHUNKED = "data.padding=batch", "data.padding=none", "task.loss_chunk=16"
BY_STRATEGY = {
    "single": Case("single", 1),
    "allreduce": Case("allreduce", 2),
    "allreduce on two machines": Case("allreduce", 4, 1, (TREE, "precision=fp16")),
    "ddp": Case("ddp", 2, 1, ("precision=bf16",)),
    "hf_accelerate": Case("hf_accelerate", 2),
    "hf_trainer": Case("hf_trainer", 2),
    "fsdp2 by step": Case("fsdp2", 2, 0, ("strategy.options.gather=step",)),
    "fsdp2 by step on two machines": Case("fsdp2", 4, 3, ("strategy.options.gather=step", TREE)),
    "fsdp2": Case("fsdp2", 2, 0, ("strategy.options.gather=micro_batch",)),
    # the random state arrives with the hidden states, and is copied to the host's generator
    "first stage": Case("pipeline", 2),
    "last stage": Case(
        "pipeline",
        2,
        1,
        (),
        {"aten::_to_copy to the host strategies/engines/pipelining.py:set_random_state": MICRO_BATCHES},
    ),
    "zero1": Case("zero1", 2),
    "zero2": Case("zero2", 2, 1),
    "zero3": Case("zero3", 2, 0, (), {"torch.cuda.synchronize deepspeed": 1}),
}
KINDS = (None, *task_runs.TASKS, "balanced", "lists, shaped")
OF_TOKENS = ("documents", "messages", "translation", "masked")


def single(*keys: str, kind: str | None = None) -> Case:
    return Case("single", 1, 0, keys, {}, kind, 2)


CASES = {name: case._replace(keys=(PADDED, *case.keys)) for name, case in BY_STRATEGY.items()}
CASES |= {  # generated text is not checked here
    f"{name}, unpadded, loss in chunks": case._replace(
        keys=(UNPADDED, CHUNKED, "task.samples=0", *case.keys), kind="documents"
    )
    for name, case in BY_STRATEGY.items()
    if name in ("allreduce", "hf_trainer", "fsdp2 by step on two machines", "fsdp2", "last stage", "zero2")
}
CASES |= {f"{kind or 'texts'} without padding": single(UNPADDED, kind=kind) for kind in KINDS}
CASES |= {f"{kind} with padding": single(PADDED, kind=kind) for kind in ("packed", "translation", "masked")}
CASES |= {f"{kind} in chunks": single(UNPADDED, CHUNKED, kind=kind) for kind in OF_TOKENS}
ODD = ("precision=bf16", "tokenizer.vocab_size=301")
APART = "task.attend_across_documents=false"
CASES |= {
    "translation padded, in chunks": single(PADDED, CHUNKED, kind="translation"),
    "texts apart, in chunks": single(UNPADDED, APART, CHUNKED, kind="packed"),
    "texts apart, padded": single(PADDED, APART, kind="packed"),
    "attention by length": single(UNPADDED, "precision=bf16", "model.config.attn_pdrop=0.0"),
    "odd vocabulary": single(UNPADDED, *ODD, kind="packed"),
    "odd vocabulary, in chunks": single(UNPADDED, CHUNKED, *ODD, kind="packed"),
    "odd vocabulary, fsdp2": Case("fsdp2", 2, 0, (*ODD, "strategy.options.gather=micro_batch"), {}, "packed"),
    "written-out attention": single("model.attention=eager", kind="prompts"),
    "smoothed": single(UNPADDED, "task.label_smoothing=0.1", kind="translation"),
}
COMPARED = ("packed without padding", "documents without padding", "packed with padding", "attention by length")
LONG = {
    *("allreduce", "fsdp2 by step", "zero1"),
    *(f"{name}, unpadded, loss in chunks" for name in BY_STRATEGY if name != "fsdp2"),
    *(f"{kind} without padding" for kind in KINDS if kind not in (None, "packed", "documents", "preference")),
    *("masked with padding", "translation with padding", "texts apart, padded"),
    *(f"{kind} in chunks" for kind in OF_TOKENS if kind != "documents"),
    *("odd vocabulary", "written-out attention", "odd vocabulary, in chunks", "translation padded, in chunks"),
    *("zero2", "hf_accelerate"),
}  # one part of what another case has
PLANTED = {
    "aten::_local_scalar_dense": 1,
    "aten::_to_copy to the device": 2,
    "aten::_to_copy to the host": 1,
    "aten::nonzero": 1,
    "event.synchronize of this step": 1,
    "stream.synchronize": 1,
    "torch.cuda.synchronize": 1,
}


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of this run's cases, from a separate interpreter: torch must know the device before it is
    imported."""
    tests = [each for each in request.session.items if each.path == request.path]
    tried = {each.callspec.params.get("name") for each in tests if hasattr(each, "callspec")}
    cases = {name: case for name, case in CASES.items() if name in tried or name in COMPARED}
    folder = tmp_path_factory.mktemp("no-gpu")
    torch_is = Path(torch.__file__).parent
    library = folder / "no_gpu.so"
    words = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", f"-I{torch_is / 'include'}"]
    words += [str(TESTS / "support/no_gpu.cpp"), "-o", str(library), f"-L{torch_is / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([*words, f"-Wl,-rpath,{torch_is / 'lib'}"], check=True, timeout=300)
    told = [
        {
            "keys": [
                f"strategy.name={case.name}",
                f"micro_batches={case.micro_batches}",
                *case.keys,
            ],
            "kind": case.kind,
            "data": str(folder / "data"),
            "ranks": case.ranks,
            "rank": case.rank,
            "per_node": min(2, case.ranks),
            "steps": STEPS,
        }
        for case in cases.values()
    ]
    told.append(told[0] | {"planted": True})
    (folder / "cases.json").write_text(json.dumps(told))
    words = [sys.executable, str(TESTS / "support/no_gpu.py"), str(library), str(folder / "cases.json"), str(folder)]
    variables = os.environ | {"PYTHONPATH": TESTS_PATH}
    said = subprocess.run(words, capture_output=True, text=True, timeout=800, env=variables)
    assert said.returncode == 0, said.stderr
    return {name: json.loads((folder / f"{i}.json").read_text()) for i, name in enumerate([*cases, "planted"])}


def test_cases_cover_every_strategy() -> None:
    assert {case.name for case in CASES.values()} == set(plugins.names("strategies"))


@pytest.mark.parametrize("name", [long(name) if name in LONG else name for name in CASES])
def test_step_mixes_no_devices_and_never_waits_for_the_device(name: str, answers: dict[str, dict[str, Any]]) -> None:
    found = answers[name]
    assert "error" not in found, found["error"]
    assert found["operations"] > 100 * STEPS
    assert found["scalars"] == {}  # no host scalar is used in an operator on the device
    for step, waits in enumerate(found["waits"]):
        expected = Counter(CASES[name].waits)
        if step:  # reads whether the previous step was finite
            expected["event.synchronize of a step before distributed/torch_internals.py:wait"] += 1
        assert Counter(waits) == expected, f"step {step}"


def test_full_rows_are_not_flattened(answers: dict[str, dict[str, Any]]) -> None:
    """Packed blocks, of which only the last may be short, keep their rows; documents of any length do not."""
    packed, documents, padded = (
        answers[name]["names"]
        for name in ("packed without padding", "documents without padding", "packed with padding")
    )
    for move in ("aten::index_select", "aten::index_copy_"):
        moved, most = (names.get(move, 0) - padded.get(move, 0) for names in (packed, documents))
        assert 4 * moved <= most, move
        assert most > CASES["documents without padding"].micro_batches * STEPS, move


def test_texts_of_any_length_use_variable_length_attention(answers: dict[str, dict[str, Any]]) -> None:
    names = answers["attention by length"]["names"]
    assert any("varlen" in name or "_flash_attention_forward" in name for name in names), sorted(names)


@pytest.mark.parametrize("name", [long(name) if name in LONG else name for name in CASES if "odd" in name])
def test_no_product_has_an_odd_vocabulary(name: str, answers: dict[str, dict[str, Any]]) -> None:
    """The head's products, forward and backward, use 320 rows for a vocabulary of 301."""
    products = answers[name]["products"]
    assert 301 not in products
    assert 320 in products


def test_the_control_planted_faults_are_found(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["planted"]
    assert "Expected all tensors to be on the same device" in found["raised"]
    assert found["waits"] == {f"{what} no_gpu.py:planted": n for what, n in PLANTED.items()}
    assert found["scalars"] == {"aten::mul": 1}
