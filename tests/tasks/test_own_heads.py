"""A pretrained file that holds a head of its own although its config ties it: every way of building has that head."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.distributed.world import World
from lockstep.tasks.models import models, source_ties
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.training import plain_check, source_weights
from lockstep.training.resolve import for_rank
from lockstep.training.session import build_session, join_ranks
from support import own_heads
from support.command import LOCKSTEP, ended, start
from support.harness import TINY, run_on
from support.hub_server import Hub
from support.messages import raises
from support.task_runs import WORDS, trained

AUTOS = {"bert": ("masked", "AutoModelForMaskedLM"), "t5": ("seq2seq", "AutoModelForSeq2SeqLM")}
CAUSAL = ("causal", "AutoModelForCausalLM")


class _Padding:
    pad_token_id = 0


def run_of(folder: Path, kind: str, *overrides: str) -> Run:
    """A run that trains `folder/model`."""
    rows = [{"text": " ".join(WORDS[(n + k) % 15] for k in range(6 + n % 7))} for n in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task: dict[str, Any] = {"name": "language_modeling", "block_size": 24, "samples": 0}
    if kind == "bert":
        task = {"name": "masked_language_modeling"}
    values = TINY | {
        "data": {"source": str(folder / "texts.jsonl"), "max_length": 24},
        "model": {"source": str(folder / "model")},
        "task": task,
        "output": str(folder / "out"),
    }
    values.pop("tokenizer", None)  # the model's own
    return load(None, list(overrides), values)


def groups(model: Any) -> list[tuple[str, ...]]:
    """Names that share a weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(map(tuple, names.values()))


@pytest.mark.parametrize("apart", [True, False], ids=["own-head", "same-values"])
@pytest.mark.parametrize("kind", own_heads.HEADS)
def test_weights_are_tied_as_from_pretrained_ties_them(kind: str, apart: bool, tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", kind, apart)
    head, auto = AUTOS.get(kind, CAUSAL)
    plain = getattr(transformers, auto).from_pretrained(tmp_path / "model")
    run = run_of(tmp_path, kind)
    whole, empty = (models.build(ModelChoice.of(run), head, _Padding(), empty) for empty in (False, True))
    assert groups(whole) == groups(empty) == groups(plain)
    head_name = own_heads.HEADS[kind]
    assert ((head_name,) in groups(plain)) is apart
    for model in (whole, empty):  # said where no forward depends on it, and where nothing is tied any more
        assert model.config.tie_word_embeddings is not (apart and kind in ("gpt2", "llama"))
    # an export of it, too
    models.save(empty.to_empty(device="cpu"), plain.state_dict(), None, tmp_path / "export")
    again = getattr(transformers, auto).from_pretrained(tmp_path / "export")
    assert all(torch.equal(t, plain.state_dict()[n]) for n, t in again.state_dict().items())


@pytest.mark.parametrize("files", ["shards", "pickle"])
def test_the_head_is_found_in_other_files(files: str, tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = {n.removeprefix("model."): t for n, t in model.state_dict().items()}  # of the base, renamed when read
    if files == "pickle":
        torch.save(weights, tmp_path / "model" / "pytorch_model.bin")
    else:
        head = {"lm_head.weight": weights.pop("lm_head.weight")}
        for name, part in (("a.safetensors", head), ("b.safetensors", weights)):
            save_file({n: t.contiguous() for n, t in part.items()}, tmp_path / "model" / name, {"format": "pt"})
        index = {"weight_map": dict.fromkeys(weights, "b.safetensors") | {"lm_head.weight": "a.safetensors"}}
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    empty = models.build(ModelChoice.of(run_of(tmp_path, "llama")), "causal", _Padding(), empty=True)
    assert ("lm_head.weight",) in groups(empty)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "gpt2", rows=own_heads.SIZE + 3)
    with raises("LS3421", "lm_head.weight", f"[{own_heads.SIZE + 3}, 32]", f"[{own_heads.SIZE}, 32]"):
        models.build(ModelChoice.of(run_of(tmp_path, "gpt2")), "causal", _Padding(), empty=True)


STRATEGIES = {
    "fsdp2": ("gpt2", ["strategy.name=fsdp2", "strategy.options.gather=micro_batch"]),
    "pipeline": ("gpt2", ["strategy.name=pipeline"]),
    "zero3": ("gpt2", ["strategy.name=zero3"]),
    "tensors": ("llama", ["strategy.name=fsdp2", "strategy.options.tensor_parallel=2"]),
    "bert": ("bert", ["strategy.name=fsdp2", "strategy.options.gather=micro_batch"]),
}


def compared(world: World, run: Run, harm: bool) -> str | None:
    """Return the result of the comparison by name. `harm`: ranks that build from the config ignore the files' names."""
    if harm:
        source_ties.own_weights = lambda run, model: ()  # type: ignore[assignment]
        source_ties.check = lambda run, model, auto: None  # type: ignore[assignment]
    job = for_rank(run, world)
    join_ranks(job, world)
    return source_weights.difference(build_session(job, world))


def told(world: World, run: Run) -> str:
    """Return the message about the comparison if a second model would be too large."""
    source_weights.WHOLE = 10
    job = for_rank(run, world)
    join_ranks(job, world)
    return plain_check.check(build_session(job, world), lambda sides, strategy: "")


@pytest.mark.processes
def test_weights_that_are_not_compared_are_named(tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "gpt2")
    (text,) = run_on(1, told, run_of(tmp_path, "gpt2"), joined=False)
    assert "match plain transformers" in text
    assert "weights not compared by name" in text
    assert "a second model of more than" in text


@pytest.mark.processes
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_strategies_train_the_head(name: str, tmp_path: Path) -> None:
    kind, overrides = STRATEGIES[name]
    own_heads.save(tmp_path / "model", kind)
    leaves = ["strategy.tensor_leaves=2"] if name == "tensors" else []
    alone, run = run_of(tmp_path, kind, *leaves), run_of(tmp_path, kind, *leaves, *overrides)
    (expected,) = run_on(1, trained, alone)
    assert run_on(2, without_warnings, run)[0]["loss"] == expected["loss"]


def without_warnings(world: World, run: Run) -> dict[str, Any]:
    """Call `trained`, with FSDP2's warning of wrong gradients, which no loss here can cause, as an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP2-wrapped module")
        return trained(world, run)


@pytest.mark.processes
@pytest.mark.parametrize("harm", [False, True], ids=["right", "dropped"])
def test_weights_are_compared_by_name_before_the_first_step(harm: bool, tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "gpt2")
    run = run_of(tmp_path, "gpt2", "strategy.name=fsdp2", "strategy.options.gather=micro_batch")
    found = run_on(2, compared, run, harm, joined=False)
    assert found[0] == found[1]
    if harm:
        assert "lm_head.weight is missing here" in str(found[0])
    else:
        assert found[0] is None


@pytest.mark.processes
def test_buffers_that_stay_float32_are_not_other_weights(tmp_path: Path) -> None:
    """Rotary frequencies beside an adapter, whose base is loaded in bfloat16."""
    own_heads.save(tmp_path / "model", "llama")
    adapter = "model.adapter={type: lora, r: 4, target_modules: [q_proj]}"
    assert run_on(1, compared, run_of(tmp_path, "llama", adapter), False, joined=False) == [None]


def test_written_file_has_its_own_header(tmp_path: Path) -> None:  # or all of the above would show nothing
    own_heads.save(tmp_path / "model", "gpt2")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    embedding = next(t for n, t in weights.items() if n.endswith("wte.weight"))
    assert not torch.equal(weights["lm_head.weight"], embedding)


@pytest.mark.parametrize("targets", [["wte"], ["lm_head"], ["wte", "lm_head"], "tying"], ids=str)
def test_an_adapter_on_tied_weights_is_merged_where_it_was_trained(targets: Any, tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "gpt2", apart=False)
    entries = (
        {"target_modules": ["wte"], "ensure_weight_tying": True} if targets == "tying" else {"target_modules": targets}
    )
    _merged_as_trained(tmp_path, "gpt2", CAUSAL, entries)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"]], ids=str)
def test_an_adapter_on_one_of_many_tied_weights(targets: list[str], tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "t5", apart=False)
    _merged_as_trained(tmp_path, "t5", AUTOS["t5"], {"target_modules": targets})


def _merged_as_trained(folder: Path, kind: str, of: tuple[str, str], entries: dict[str, Any]) -> None:
    """The export of a model whose adapter is no longer nothing computes what the model does."""
    run = run_of(folder, kind)
    run = run.model_copy(update={"model": run.model.model_copy(update={"adapter": {"r": 2, **entries}})})
    model: Any = models.build(ModelChoice.of(run), of[0], _Padding()).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    ids = torch.arange(1, 9).unsqueeze(0)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if kind == "t5" else {})
    with torch.no_grad():
        expected = model(**inputs).logits
    models.save(model, {n: t.clone() for n, t in model.state_dict().items()}, None, folder / "export", run.model)
    again = getattr(transformers, of[1]).from_pretrained(folder / "export").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


def _train(folder: Path, cache: Path, output: str, *overrides: str, **variables: str) -> str:
    """Train `run.yaml`. Out: the hash of the exported weights."""
    command = [*LOCKSTEP, "train", "run.yaml", f"output={output}", *overrides]
    status, _, err = ended(start(command, folder, cache, **variables))
    assert status == 0, err
    return hashlib.sha256((folder / output / "export" / "model.safetensors").read_bytes()).hexdigest()


MICRO_BATCHES = ["strategy.name=fsdp2", "strategy.options.gather=micro_batch", "launch.processes=2"]


@pytest.mark.processes
def test_a_trained_head_is_resumed_under_another_strategy(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_heads.save(tmp_path / "model", "gpt2")
    _write(tmp_path, run_of(tmp_path, "gpt2", "steps=8", "checkpoint.every=4"))
    whole = _train(tmp_path, cache, "out")
    shutil.rmtree(tmp_path / "out/export")
    shutil.rmtree(tmp_path / "out/checkpoints/step-000008")
    assert _train(tmp_path, cache, "out", *MICRO_BATCHES) == whole
    assert "resuming after step 4 of 8" in (tmp_path / "out/log.txt").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "without_its_model"))
    source = "model.source=out/checkpoints/latest"  # these options are refused by the model's config
    assert main(["plan", "run.yaml", "output=more", source, *MICRO_BATCHES]) == 0


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_a_head_on_the_hub_is_trained_by_all_strategies_and_offline(pickled: bool, tmp_path: Path, cache: Path) -> None:
    own_heads.save(tmp_path / "model", "gpt2")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    if pickled:
        del files["model.safetensors"]
        torch.save(load_file(tmp_path / "model/model.safetensors"), tmp_path / "weights")
        files["pytorch_model.bin"] = (tmp_path / "weights").read_bytes()
    run = run_of(tmp_path, "gpt2", "steps=2")
    _write(tmp_path, run)
    local = _train(tmp_path, cache, "local")
    with Hub() as hub:
        hub.put("models", "user/own", files)
        there = {"model.source": "user/own"}
        overrides = [f"{key}={value}" for key, value in there.items()]
        online = hub.environment(tmp_path / "home")
        assert _train(tmp_path, cache, "online", *overrides, *MICRO_BATCHES, **online) == local
    assert _train(tmp_path, cache, "offline", *overrides, *MICRO_BATCHES, **online | {"HF_HUB_OFFLINE": "1"}) == local


def _write(folder: Path, run: Run) -> None:
    text = yaml.safe_dump(run.model_dump(mode="json", exclude_unset=True))
    (folder / "run.yaml").write_text(text, encoding="utf-8")
