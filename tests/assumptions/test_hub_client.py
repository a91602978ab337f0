"""Assumptions about the Hub's client, tested with a fake Hub on the loopback interface."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from support.assumed import rests_on_it
from support.hub_server import Hub
from support.places import TESTS_PATH

pytestmark = pytest.mark.processes


def seen() -> dict[str, Any]:
    """Return what `support.assumed_hub` recorded, and the fake Hub afterwards. Raises the first call's error again on
    later calls."""
    found = _seen()
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _seen() -> dict[str, Any] | Exception:
    try:
        return _run()
    except Exception as error:
        return error


def _run() -> dict[str, Any]:
    from safetensors.torch import save

    with Hub() as hub, tempfile.TemporaryDirectory() as home:
        weights = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})
        hub.put("models", "user/model", {"config.json": b"{}", "model.safetensors": weights})
        hub.put("models", "user/gated", {"config.json": b"{}"}, gated=True)
        commit = hub.put("datasets", "user/rows", {"a.jsonl": b"{}\n", "deep/b.jsonl": b"{}\n"})
        # `errors` calls whoami: one answer of 503, then no answers
        hub.faults = {"whoami-v2": [503, "silent", "silent", "silent", "silent", "silent", "silent"]}
        environment = os.environ | hub.environment(home) | {"PYTHONPATH": TESTS_PATH}
        words = [sys.executable, "-m", "support.assumed_hub"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["commit of rows"], found["home"] = commit, home
        found["commits of new"] = list(hub.repositories["models", "user/new"].commits)
        found["refused"] = sum(line.startswith("whoami-v2") for line in hub.asked)
    return found


@rests_on_it("src/lockstep/tasks/models/source_ties.py")
def test_errors_for_a_missing_file() -> None:
    """hf_hub_download raises EntryNotFoundError for a file that the repository lacks, and with local_files_only
    LocalEntryNotFoundError for a file that the cache lacks. The latter is a subclass, so lockstep catches it first."""
    errors = seen()["errors"]
    assert "EntryNotFoundError" in errors["file"]["kinds"]
    assert errors["file"]["kinds"][0] != "LocalEntryNotFoundError"
    assert errors["file not here"]["kinds"][0] == "LocalEntryNotFoundError"
    assert "EntryNotFoundError" in errors["file not here"]["kinds"]


@rests_on_it("src/lockstep/data/hub.py", "src/lockstep/checkpoint/hub_push.py", "src/lockstep/data/object_store.py")
def test_errors_of_the_hub_have_their_class_and_status() -> None:
    """Gated repositories, missing repositories, missing revisions and status 503 raise HfHubHTTPError with the
    response's status. The error for gated repositories is a subclass of that for missing ones, so lockstep tests it
    first."""
    errors = seen()["errors"]
    assert (errors["repository"]["kinds"][0], errors["repository"]["status"]) == ("RepositoryNotFoundError", 404)
    assert (errors["gated"]["kinds"][0], errors["gated"]["status"]) == ("GatedRepoError", 403)
    assert "RepositoryNotFoundError" in errors["gated"]["kinds"]
    assert (errors["revision"]["kinds"][0], errors["revision"]["status"]) == ("RevisionNotFoundError", 404)
    assert errors["unavailable"]["status"] == 503
    for name in ("repository", "gated", "revision", "unavailable"):
        assert "HfHubHTTPError" in errors[name]["kinds"], name


@rests_on_it("src/lockstep/checkpoint/hub_push.py")
def test_the_session_has_one_timeout() -> None:
    """get_session returns one session, whose `timeout` in seconds ends a request that gets no answer."""
    errors = seen()["errors"]
    assert errors["same session"]
    assert {"TransportError", "TimeoutError"} & {*errors["silent"]["kinds"]}
    assert errors["silent"]["seconds"] >= 0.9
    assert errors["silent"]["seconds"] < 60


@rests_on_it("src/lockstep/data/hub.py")
def test_requests_without_retries() -> None:
    """http_backoff and the unwrapped http_stream_backoff have the keyword max_retries, whose default can be set to 0. A
    refused connection then raises a subclass of TransportError, ConnectionError or TimeoutError."""
    for name in ("http_backoff", "http_stream_backoff"):
        assert seen()["errors"][f"{name} has max_retries"], name
    for name in ("unreachable", "unreachable request", "unreachable stream", "unreachable file"):
        error = seen()["errors"][name]
        assert {"TransportError", "ConnectionError", "TimeoutError"} & {*error["kinds"]}, name
        assert error["seconds"] < 10, name


@rests_on_it("src/lockstep/data/hub.py")
def test_offline_requests_raise() -> None:
    """With HF_HUB_OFFLINE, a request raises OfflineModeIsEnabled or a subclass, and nothing is sent."""
    assert {"OfflineModeIsEnabled", "LocalEntryNotFoundError"} & {*seen()["errors"]["offline"]["kinds"]}


@rests_on_it("src/lockstep/data/object_store.py", "src/lockstep/data/hub.py")
def test_files_of_a_data_set_are_listed_with_size_and_hash() -> None:
    """list_repo_tree with recursive=True lists files in folders as RepoFile with size and Git hash. get_paths_info
    leaves out missing paths."""
    reading = seen()["reading"]
    assert {name: size for name, (size, _) in reading["files"].items()} == {"a.jsonl": 3, "deep/b.jsonl": 3}
    assert all(len(tag) == 40 for _, tag in reading["files"].values())
    assert reading["absent"] == []


@rests_on_it("src/lockstep/tasks/models/source_ties.py")
def test_shapes_are_read_from_the_headers() -> None:
    """get_safetensors_metadata returns the shapes of all tensors in a repository's files, by name."""
    assert seen()["reading"]["shapes"] == {"a": [2, 3], "b": [4]}


@rests_on_it(
    "src/lockstep/data/hub.py",
    "src/lockstep/data/hub_rows.py",
    "src/lockstep/plain/rows.py",
    "src/lockstep/tasks/models/source_ties.py",
)
def test_a_revision_is_a_commit_in_the_cache() -> None:
    """hf_hub_download returns the path in snapshots/COMMIT of HF_HOME's cache. dataset_info has the commit of the
    branch in `sha`."""
    reading = seen()["reading"]
    assert reading["text"] == "{}"
    assert Path(reading["path"]).parts[-3] == "snapshots"
    assert len(Path(reading["path"]).parts[-2]) == 40
    assert reading["path"].startswith(seen()["home"])
    assert reading["sha"] == seen()["commit of rows"]


@rests_on_it("src/lockstep/data/hub.py")
def test_optional_files_are_none() -> None:
    """transformers' cached_file returns None for a missing file and for a gated repository if its raise options are
    off."""
    assert seen()["reading"]["cached"] == [True, True, False]


@rests_on_it("src/lockstep/checkpoint/hub_push.py")
def test_create_repo_leaves_an_existing_repository_unchanged() -> None:
    """create_repo with exist_ok leaves an existing repository unchanged; model_info has `private` and file names."""
    writing = seen()["writing"]
    assert writing["private"] is True
    assert writing["before"] == []


@rests_on_it("src/lockstep/checkpoint/hub_push.py")
def test_create_commit_makes_one_commit() -> None:
    """create_commit makes one commit of all additions and deletions, and returns its hash as `oid`."""
    writing = seen()["writing"]
    assert writing["commits"] == seen()["commits of new"]
    assert len(writing["commits"]) == 2
    assert writing["after"] == ["README.md"]


@rests_on_it("src/lockstep/checkpoint/hub_push.py")
def test_a_file_has_the_title_of_its_last_commit() -> None:
    """get_paths_info with expand=True has last_commit with its title; without it, last_commit is None.
    hf_raise_for_status of the session's response returns for an existing file, and raises EntryNotFoundError for a
    missing one."""
    writing = seen()["writing"]
    assert writing["titles"] == [["README.md", "made"], ["README.md", None]]
    assert [writing[f"raised for {name}"] for name in ("README.md", "absent")] == [[], ["RemoteEntryNotFoundError"]]


@rests_on_it("src/lockstep/tasks/models/models.py", "src/lockstep/tasks/models/model_configs.py")
def test_a_config_of_the_wrong_type_is_an_error_of_the_hubs_client() -> None:
    """A transformers config raises huggingface_hub's StrictDataclassError for an entry of the wrong type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    with pytest.raises(StrictDataclassError):
        LlamaConfig(hidden_size="many")  # type: ignore[arg-type]


@rests_on_it("src/lockstep/data/hub.py", "src/lockstep/data/object_store.py")
def test_a_session_hook_can_stop_each_request() -> None:
    """The session of get_session has lists of event_hooks. After a custom client factory is set, get_session returns
    its session: a request hook that raises prevents each request, without a connection. hf_hub_url quotes a path and a
    revision."""
    from huggingface_hub import get_session, hf_hub_url, set_client_factory
    from huggingface_hub.utils import _http

    client: Any = get_session()
    library = sys.modules[type(client).__module__.partition(".")[0]]

    def fail(request: Any) -> None:
        raise library.ConnectError("ended", request=request)

    assert isinstance(client.event_hooks["request"], list)
    hooks = {**client.event_hooks, "request": [fail]}  # the tests' own session is offline, by such a hook
    set_client_factory(lambda: library.Client(event_hooks=hooks, follow_redirects=True, timeout=None))
    try:
        with pytest.raises(library.ConnectError, match="ended"):
            get_session().get("http://127.0.0.1:9/")
    finally:
        set_client_factory(_http.default_client_factory)
    address = hf_hub_url("user/rows", "deep/a b.jsonl", repo_type="dataset", revision="refs/pr/1")
    assert address.endswith("/datasets/user/rows/resolve/refs%2Fpr%2F1/deep/a%20b.jsonl")
