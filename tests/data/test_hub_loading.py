"""Data and models from the Hub, at fixed revisions, and pushed ones; what cannot be loaded gives one message."""

import inspect
import json
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants, set_client_factory
from huggingface_hub.repocard_data import model_index_to_eval_results
from huggingface_hub.utils import _http, http_backoff, http_stream_backoff
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lockstep.config.run import Run
from lockstep.data import hub as hub_names
from lockstep.data.source import names_hub
from lockstep.tasks.models import model_configs
from support.command import LOCKSTEP
from support.harness import tiny
from support.hub_jobs import PUSH, RUN, Command, finished, hub, lockstep, process, trained
from support.hub_server import Hub
from support.messages import mentions, raises

__all__ = ["finished", "hub", "lockstep", "trained"]  # fixtures


def rows(shift: int) -> bytes:
    """Return forty examples whose label follows from the text; `shift` makes another version of them."""
    lines = [{"text": f"word{(i + shift) % 7} is {'good' if i % 2 else 'bad'}", "label": i % 2} for i in range(40)]
    return "\n".join(map(json.dumps, lines)).encode()


def tiny_model(folder: Path, finished: Path, width: int = 16) -> dict[str, bytes]:
    """Write a pretrained GPT-2 with the tokenizer of another run, as the files of a repository."""
    tokenizer = AutoTokenizer.from_pretrained(finished / "out/export")
    torch.manual_seed(width)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=width, vocab_size=len(tokenizer), n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def from_hub(folder: Path, **data: object) -> None:
    values = {k: v for k, v in RUN.items() if k not in ("tokenizer", "hub")}
    values |= {"data": {"source": "user/set", "max_length": 16, **data}, "model": {"source": "user/tiny"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.processes
def test_data_and_model_come_from_the_hub_at_their_revisions(
    hub: Hub, finished: Path, tmp_path: Path, cache: Path
) -> None:
    old = hub.put("datasets", "user/set", {"train.jsonl": rows(0), "README.md": b"# set"})
    hub.put("datasets", "user/set", {"train.jsonl": rows(3), "README.md": b"# set, again"})
    first = hub.put("models", "user/tiny", tiny_model(tmp_path / "a", finished))
    hub.put("models", "user/tiny", tiny_model(tmp_path / "b", finished, width=32))
    from_hub(tmp_path, revision=old)
    words = ["data.config=default", f"model.revision={first}", "data.validation_fraction=0.25"]
    done = process(tmp_path, cache, hub, *LOCKSTEP, "train", "run.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/export/config.json").read_text())["n_embd"] == 16  # the newest revision has 32
    head = ModelCard.load(tmp_path / "out/export/README.md").data.to_dict()
    assert head["base_model"] == "user/tiny"
    assert head["datasets"] == ["user/set"]
    results = model_index_to_eval_results(head["model-index"])[1]
    assert {r.dataset_revision for r in results} == {old}


@pytest.mark.processes
def test_a_pushed_model_loads(hub: Hub, finished: Path, cache: Path, lockstep: Command) -> None:
    assert lockstep(finished, *PUSH)[0] == 0
    code = (
        "import torch\nfrom transformers import AutoModelForSequenceClassification as M, AutoTokenizer as T\n"
        "for place in ('user/feelings', 'out/export'):\n"
        "    text = T.from_pretrained(place)('i feel fine', return_tensors='pt')\n"
        "    with torch.no_grad():\n"
        "        print(M.from_pretrained(place).eval()(**text).logits.tolist())\n"
    )
    done = process(finished, cache, hub, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    there, here = done.stdout.splitlines()
    assert there == here
    assert hub.count("resolve") > 0


# override -> what the message must contain
NOT_LOADED = {
    "data.source=user/none": ["data.source", "user/none", "doesn't exist"],
    "data.source=user/closed-set": ["data.source", "user/closed-set", "gated"],
    "data.revision=v9": ["data.source", "user/set", "v9"],
    "model.source=user/none": ["model.source", "user/none", "no such repository"],
    "model.source=user/closed": ["model.source", "user/closed", "gated"],
    "model.revision=v9": ["model.source", "user/tiny", "v9"],
}


@pytest.mark.processes
def test_each_loading_error_is_one_message(hub: Hub, finished: Path, tmp_path: Path, cache: Path) -> None:
    for name, gated in (("set", False), ("closed-set", True)):
        hub.put("datasets", f"user/{name}", {"train.jsonl": rows(0), "README.md": b"# set"}, gated=gated)
    model = tiny_model(tmp_path / "a", finished)
    hub.put("models", "user/tiny", model)
    hub.put("models", "user/closed", model, gated=True)
    from_hub(tmp_path)
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        f"for word in {list(NOT_LOADED)!r}:\n"
        "    print('-- ', word, main(['train', 'run.yaml', word]), file=sys.stderr, flush=True)\n"
    )
    done = process(tmp_path, cache, hub, sys.executable, "-c", code)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("lockstep: ") == len(NOT_LOADED)
    said, rest = {}, done.stderr
    for word in NOT_LOADED:
        message, mark, rest = rest.partition(f"--  {word} 2\n")
        assert mark, done.stderr
        said[word] = message
    for word, wanted in NOT_LOADED.items():
        for text in wanted:
            assert text in said[word], said[word]
    assert not (tmp_path / "out").exists()


def test_an_unreachable_hub_gets_one_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for function in map(inspect.unwrap, (http_backoff, http_stream_backoff)):
        monkeypatch.setattr(function, "__kwdefaults__", function.__kwdefaults__)
    hub_names.unreachable.cache_clear()
    try:
        hub_names.be_brief()
        waits: list[float] = []
        monkeypatch.setattr(time, "sleep", waits.append)
        with pytest.raises(Exception, match=r"refused|connect"):
            http_backoff("HEAD", "http://127.0.0.1:9/some/model")
        with pytest.raises(Exception, match=r"refused|connect"), http_stream_backoff("GET", "http://127.0.0.1:9/file"):
            pass
        assert waits == []
        assert caplog.text == ""
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the proxy may reach it
        hub_names.unreachable.cache_clear()
        assert hub_names.unreachable() is None
    finally:
        hub_names.unreachable.cache_clear()


def test_a_silent_host_gets_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` and `train` once waited for more than 100 s in silence, six times 10 s per file."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts; nothing reads
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_names, "ANSWER_S", 0.2)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for function in map(inspect.unwrap, (http_backoff, http_stream_backoff)):
            monkeypatch.setattr(function, "__kwdefaults__", function.__kwdefaults__)
        hub_names.unreachable.cache_clear()
        began = time.monotonic()
        try:
            hub_names.be_brief()
            for _ in range(3):
                with pytest.raises(Exception, match="does not answer") as caught:
                    http_backoff("HEAD", f"{address}/some/model")
            said = hub_names.explained(caught.value)
            assert address in said
            assert "HF_ENDPOINT" in said
            with raises("LS3131", "does not answer", address):
                model_configs.load_config(tiny(model={"source": "some/none"}).model)
        finally:
            hub_names.unreachable.cache_clear()
            set_client_factory(_http.default_client_factory)
    assert time.monotonic() - began < 60


def test_all_requests_to_the_hub_have_a_short_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`init`, `predict` and `evaluate`, which prepare no run first, time out quickly too; local paths send no
    request."""
    calls: list[None] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_names, "be_brief", lambda: calls.append(None))
    with hub_names.downloading("some/set", "dataset"):
        assert len(calls) == 1
    assert hub_names.optional_file("some/none", "config.json", None) is None
    assert len(calls) == 2
    with raises("LS3131"):
        model_configs.load_config(tiny(model={"source": "some/none"}).model)
    assert len(calls) == 3
    with hub_names.downloading(str(tmp_path), "dataset"):
        assert hub_names.optional_file(str(tmp_path), "config.json", None) is None
    assert len(calls) == 3


def on_hub(run: Run) -> bool:
    return names_hub(run.data, run.model.source, run.tokenizer.source)


def test_only_valid_repository_names_are_requested(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    local = {"data": {"train": str(tmp_path / "train.csv")}, "model": {"source": str(tmp_path)}}
    assert not on_hub(Run.load(local))
    assert on_hub(Run.load(local | {"model": "some/model"}))
    assert on_hub(Run.load(local | {"tokenizer": "some/tokenizer"}))
    assert not on_hub(Run.load(local | {"data": "builtin/emotion"}))
    assert not on_hub(Run.load(local | {"data": {"source": "s3://bucket/set", "train": "a.csv"}}))


PAGE = b"---\nlicense: mit\n---\n# set"
DECLARED = (
    b"---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n  - {name: label, dtype: string}\n---\n# set"
)
SEMICOLONS = (
    b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: data/*.csv}\n  sep: ;\n---\n# set"
)
OWN_OPTIONS = SEMICOLONS.replace(b"sep: ;", b"skiprows: 1")
READ = """
import sys
from lockstep.config.run import RunError, load
from lockstep.data import source
from lockstep.data.column_types import ColumnUse
for name in sys.argv[1:]:
    run = load(None, [], {"data": "user/" + name, "task": "classification", "model": "builtin/tiny"})
    try:
        read = source.load(run.data, 0, None, {"task.text": "text", "task.label": "label"}, None, {"label": "label"})
        print(name, read.splits["train"]["label"][:], *read.notes)
    except RunError as error:
        print(name, error)
"""


@pytest.mark.processes
def test_labels_on_the_hub_are_the_texts_in_the_files(hub: Hub, tmp_path: Path, cache: Path) -> None:
    """`datasets` reads "01" as 1 among numbers and in tables, and drops "null" and "NA"."""
    labels = ["01", "1", 1, "null", "007", "x", "2020-01-01"]
    mixed = "\n".join(json.dumps({"text": f"word {i}", "label": label}) for i, label in enumerate(labels)).encode()
    tables = {"numbers": ["01", "1", "2"], "words": ["NA", "null", "x"]}
    table = {name: "\n".join(["text,label", *(f"a,{label}" for label in some)]) for name, some in tables.items()}
    hub.put("datasets", "user/mixed", {"train.jsonl": mixed, "README.md": PAGE})
    hub.put("datasets", "user/declared", {"train.jsonl": mixed, "README.md": DECLARED})
    for name, text in table.items():
        hub.put("datasets", f"user/{name}", {"train.csv": text.encode(), "README.md": PAGE})
    hub.put(
        "datasets",
        "user/semicolons",
        {"data/a.csv": table["numbers"].replace(",", ";").encode(), "README.md": SEMICOLONS},
    )
    odd = f"a remark\n{table['numbers']}"
    hub.put("datasets", "user/options", {"data/a.csv": odd.encode(), "README.md": OWN_OPTIONS})
    odd_json = OWN_OPTIONS.replace(b"*.csv", b"*.jsonl").replace(b"skiprows: 1", b"encoding_errors: replace")
    hub.put("datasets", "user/refused", {"data/a.jsonl": mixed, "README.md": odd_json})
    names = ["refused", "mixed", "declared", "numbers", "words", "semicolons", "options"]
    done = process(tmp_path, cache, hub, sys.executable, "-c", READ, *names)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said["mixed"] == str(labels)
    assert mentions(said["refused"], "LS2460", "'label'", "user/refused", "data.train")
    assert said["declared"] == str([str(label) for label in labels])
    for name in ("numbers", "semicolons"):
        assert said[name].startswith("['01', '1', '2'] column 'label' holds whole numbers"), said[name]
    assert said["words"] == "['NA', 'null', 'x']"
    assert said["options"].startswith("[1, 1, 2] column 'label' of the train split of user/options was read as numbers")
    code = f"import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n{READ}"
    offline = process(tmp_path, cache, hub, sys.executable, "-c", code, *names)
    assert offline.stdout == done.stdout, offline.stderr
