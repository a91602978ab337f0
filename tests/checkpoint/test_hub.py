"""The Hub: pushing, and continuing an interrupted push, against a local server that injects faults."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from lockstep.checkpoint.hub_push import PushFailed, PushPatience, push
from lockstep.config.run import RunError
from lockstep.distributed.world import World
from lockstep.training.resolve import for_rank
from lockstep.training.startup import finished_already
from support.command import LOCKSTEP
from support.harness import run_on, tiny
from support.hub_jobs import PUSH, RUN, Command, finished, hub, lockstep, process, train_in, trained
from support.hub_server import READER, WRITER, Hub
from support.messages import mentions

__all__ = ["finished", "hub", "lockstep", "trained"]  # fixtures


def same_bytes(hub: Hub, export: Path, name: str = "user/feelings") -> None:
    """Check that the repository equals the export, except for the model's name on the card."""
    there = hub.files(name)
    local = {str(p.relative_to(export)): p.read_bytes() for p in export.rglob("*") if p.is_file()}
    assert set(there) == set(local)
    for path, content in local.items():
        assert there[path] == content.replace(b"PATH_OR_REPO", name.encode()), path


@pytest.mark.processes
def test_a_push_uploads_to_a_private_repository(hub: Hub, finished: Path, cache: Path) -> None:
    done = process(finished, cache, hub, *LOCKSTEP, *PUSH)
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.address}/user/feelings" in done.stdout
    assert WRITER not in done.stdout + done.stderr
    same_bytes(hub, finished / "out/export")
    there = hub.repositories["models", "user/feelings"]
    assert there.private
    assert len(there.commits) == 1
    assert json.loads((finished / "out/hub.json").read_text())["commit"] == there.names["main"]


@pytest.mark.processes
def test_pushing_equal_files_sends_nothing(hub: Hub, finished: Path, lockstep: Command) -> None:
    assert lockstep(finished, *PUSH)[0] == 0
    before, commits = hub.received, hub.count("commit")
    status, out, _ = lockstep(finished, *PUSH)
    assert status == 0
    assert "pushed to" not in out
    assert f"unchanged: {hub.address}/user/feelings holds this export already" in out
    assert before > 0
    assert hub.received == before
    assert hub.count("commit") == commits == 1


@pytest.mark.processes
def test_a_push_removes_weights_of_an_earlier_one(hub: Hub, finished: Path, lockstep: Command) -> None:
    mine = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.md": b"mine"}
    stale = {"chat_template.jinja": b"old", "additional_chat_templates/rag.jinja": b"old", "added_tokens.json": b"{}"}
    stale |= {"adapter_config.json": b"{}", "pytorch_model.bin": b"old"}
    mine |= stale  # transformers would load them together with the export's files
    hub.put("models", "user/feelings", mine, private=True)
    ours = {"generation_config.json": b"{}"}  # from an earlier push
    hub.repositories["models", "user/feelings"].commit(mine | ours, title="Trained with lockstep")
    assert lockstep(finished, *PUSH)[0] == 0
    there = hub.files("user/feelings")
    by_hand = there | {"generation_config.json": b'{"temperature": 0.7}'}
    hub.put("models", "user/feelings", by_hand)
    (finished / "out/export/README.md").write_text((finished / "out/export/README.md").read_text() + "\n")
    assert lockstep(finished, *PUSH)[0] == 0
    again = hub.files("user/feelings")
    assert again.pop("generation_config.json") == by_hand["generation_config.json"]
    assert again.keys() == there.keys()
    assert there.pop("notes.md") == b"mine"  # push does not remove the user's file
    assert set(there) == {str(p.relative_to(finished / "out/export")) for p in (finished / "out/export").rglob("*")}


@pytest.mark.processes
def test_model_of_another_size_is_replaced_only_on_request(hub: Hub, finished: Path, lockstep: Command) -> None:
    config = json.loads((finished / "out/export/config.json").read_text())
    size = next(name for name in ("hidden_size", "n_embd") if name in config)
    theirs = {"config.json": json.dumps(config | {size: config[size] * 2}).encode(), "model.safetensors": b"theirs"}
    hub.put("models", "user/feelings", theirs, private=True)
    status, _, err = lockstep(finished, *PUSH)
    assert status == 2
    assert mentions(err, "LS6023", f"{size} {config[size] * 2} there", "--replace")
    assert hub.files("user/feelings") == theirs
    assert lockstep(finished, *PUSH, "--replace")[0] == 0
    same_bytes(hub, finished / "out/export")
    assert lockstep(finished, *PUSH)[0] == 0  # the control: the same sizes
    (finished / "out/export/config.json").write_text(json.dumps(config | {size: config[size] * 2}))
    status, _, err = lockstep(finished, *PUSH, "--replace")
    assert status == 2
    assert mentions(err, "LS3494", "out/export")


@pytest.mark.processes
@pytest.mark.parametrize(
    "faults",
    [
        {"repos": [500]},
        {"preupload": [503]},
        {"batch": [500]},
        {"lfs": ["cut"]},
        {"lfs": [502]},
        {"commit": [500]},
        {"commit": ["cut"]},
        {"repos": ["cut"], "commit": [429]},
    ],
    ids=str,
)
def test_transient_errors_are_retried(faults: dict, hub: Hub, finished: Path, lockstep: Command) -> None:
    hub.faults = {what: list(each) for what, each in faults.items()}
    status, _, err = lockstep(finished, *PUSH)
    assert status == 0, err
    assert not any(hub.faults.values()), "the fault was never met"
    same_bytes(hub, finished / "out/export")
    assert len(hub.repositories["models", "user/feelings"].commits) == 1


@pytest.mark.processes
def test_an_interrupted_push_continues(hub: Hub, finished: Path, lockstep: Command) -> None:
    """The push times out at the commit; the weights have arrived, and the next push does not send them again."""
    hub.faults = {"commit": ["cut"] * 4}
    status, out, err = lockstep(finished, *PUSH)
    assert status == 1
    assert out.count("trying again") == 3
    assert "failed 4 times" in err
    assert "lockstep push out user/feelings" in err
    assert "Traceback" not in err
    assert hub.files("user/feelings") == {}  # nobody sees a partial push
    assert hub.count("lfs") == 1
    assert lockstep(finished, *PUSH)[0] == 0
    assert hub.count("lfs") == 1
    same_bytes(hub, finished / "out/export")


@pytest.mark.processes
def test_a_silent_hub_times_out(hub: Hub, finished: Path, lockstep: Command) -> None:
    assert lockstep(finished, "push", "out", "user/other")[0] == 0  # control
    hub.faults = {"commit": ["silent"] * 2}
    with pytest.raises(PushFailed, match="failed 2 times"):
        push(finished / "out", "user/feelings", True, print, PushPatience(tries=2, wait_s=0, timeout_s=0.2))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("token", "faults", "wanted"),
    [
        (None, {}, ["no token", "HF_TOKEN"]),
        ("x-4711", {}, ["401", "HF_TOKEN"]),
        (READER, {}, ["403", "permission"]),
        (WRITER, {"commit": [403]}, ["403", "permission"]),
        (WRITER, {"repos": [401]}, ["401"]),
    ],
)
def test_a_refusal_is_not_retried(
    token: str | None, faults: dict, wanted: list[str], hub: Hub, finished: Path, lockstep: Command
) -> None:
    hub.faults = {what: list(each) for what, each in faults.items()}
    status, out, err = lockstep(finished, *PUSH, token=token)
    assert status == 2
    assert err.count("lockstep: ") == 1
    assert "Traceback" not in err
    assert token is None or token not in out + err
    for text in wanted:
        assert text in err
    assert hub.count("repos") <= 1  # not retried
    assert not hub.files("user/feelings") if ("models", "user/feelings") in hub.repositories else hub.received == 0


@pytest.mark.processes
def test_a_private_push_to_a_public_repository_is_refused(hub: Hub, finished: Path, lockstep: Command) -> None:
    hub.put("models", "user/feelings", {"a": b"b"}, private=False)
    status, _, err = lockstep(finished, *PUSH)
    assert status == 2
    assert "public" in err
    assert hub.received == 0
    assert lockstep(finished, *PUSH, "--public")[0] == 0
    assert "model.safetensors" in hub.files("user/feelings")


@pytest.mark.processes
@pytest.mark.parametrize("word", ["feelings", "user/", "a/b/c", "../x"])
def test_an_invalid_repository_name_is_refused(word: str, hub: Hub, finished: Path, lockstep: Command) -> None:
    status, _, err = lockstep(finished, "push", "out", word)
    assert status == 2
    assert "USER/REPO" in err
    assert hub.asked == []


def test_an_unfinished_run_has_nothing_to_push(tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "out").mkdir()
    status, _, err = lockstep(tmp_path, *PUSH)
    assert status == 2
    assert mentions(err, "LS6017")


# -- from a run ------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_run_pushes_at_its_end_and_retries_at_the_next_start(hub: Hub, tmp_path: Path, lockstep: Command) -> None:
    values = RUN | {"hub": {"push_to": "user/feelings"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    hub.faults = {"commit": [403]}
    assert run_on(2, train_in, str(tmp_path), values, hub.address, joined=False) == [1, 0]  # only rank 0 pushes
    assert (tmp_path / "out/export/model.safetensors").exists()
    assert not (tmp_path / "out/hub.json").exists()
    status, out, err = lockstep(tmp_path, "train", "run.yaml")
    assert status == 0, err
    assert "is finished" in out
    assert "pushed to" in out
    same_bytes(hub, tmp_path / "out/export")
    asked = len(hub.asked)
    assert lockstep(tmp_path, "train", "run.yaml", token=None)[0] == 0  # everything is done, so no token is needed
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("token", "push_to", "wanted"),
    [
        (None, "user/x", "LS6015"),
        (READER, "user/x", "LS6013"),
        (WRITER, "else/x", "LS6014"),
        ("x-4711", "user/x", "401"),
    ],
)
def test_an_impossible_push_is_refused_before_training(
    token: str | None, push_to: str, wanted: str, tmp_path: Path, lockstep: Command
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"hub": {"push_to": push_to}}))
    status, _, err = lockstep(tmp_path, "train", "run.yaml", token=token)
    assert status == 2
    assert wanted in err
    assert "hub.push_to" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "private", "code"),
    [
        ({"model_type": "llama"}, True, "LS6023"),
        ({"model_type": "gpt2", "vocab_size": 5}, True, None),  # the tokenizer's size is known later
        ({}, False, "LS6021"),
    ],
)
def test_a_repository_of_another_model_is_refused_before_training(
    config: dict[str, Any], private: bool, code: str | None, hub: Hub, tmp_path: Path, lockstep: Command
) -> None:
    hub.put("models", "user/x", {"config.json": json.dumps(config).encode()}, private=private)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"hub": {"push_to": "user/x"}, "steps": 1}))
    status, _, err = lockstep(tmp_path, "train", "run.yaml")
    if code is None:
        assert (tmp_path / "out/export").is_dir(), err
        return
    assert status == 2
    assert mentions(err, code, "user/x")
    assert not (tmp_path / "out").exists()


def no_token_among_ranks(world: World, folder: str) -> str:
    os.environ.pop("HF_TOKEN", None)
    run = tiny(output=f"{folder}/out", hub={"push_to": "user/x"})
    try:
        finished_already(for_rank(run, world), world)
    except RunError as refused:
        return str(refused)
    return "not refused"


@pytest.mark.processes
def test_ranks_are_refused_together(tmp_path: Path) -> None:
    """All ranks refuse together under plain torchrun, where no launcher of lockstep has checked the Hub before."""
    for said in run_on(2, no_token_among_ranks, str(tmp_path)):
        assert "no token" in said


# -- the card --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_card_is_complete_and_the_hub_s_own_parser_reads_it(trained: Path) -> None:
    path = trained / "out/export/README.md"
    card = ModelCard.load(path)
    head = card.data.to_dict()
    assert head["license"] == "apache-2.0"
    assert head["language"] == ["en"]
    assert head["tags"] == ["lockstep", "text-classification", "feelings"]
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "text-classification")
    assert head["metrics"] == ["accuracy", "ece", "f1", "roc_auc"]
    name, results = model_index_to_eval_results(head["model-index"])
    assert name == "feelings"
    lines = [json.loads(line) for line in (trained / "out/metrics.jsonl").read_text().splitlines()]
    for split in ("validation", "test"):
        scored = next(line for line in lines if line["split"] == split)
        found = {r.metric_type: r.metric_value for r in results if r.dataset_split == split}
        assert found == {
            "loss": round(scored["loss"], 6),
            "accuracy": round(scored["accuracy"], 6),
            "f1": round(scored["macro_f1"], 6),
            **{name: round(scored[name], 6) for name in ("ece", "roc_auc")},
        }
    kept = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert kept == yaml.safe_load((trained / "out/run.yaml").read_text())
    assert 'pipeline("text-classification", model="PATH_OR_REPO")' in card.text


@pytest.mark.processes
def test_a_card_that_the_hub_would_refuse_is_not_pushed(hub: Hub, finished: Path, lockstep: Command) -> None:
    path = finished / "out/export/README.md"
    path.write_text(path.read_text().replace("model-index:\n- name: feelings", "model-index:\n- nom: feelings"))
    status, _, err = lockstep(finished, *PUSH)
    assert status == 2
    assert "README.md" in err
    assert "model-index" in err.replace("_", "-")
    assert hub.received == 0
