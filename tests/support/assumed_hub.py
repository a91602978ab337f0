"""Facts about the Hub's client, observed in its own process with a Hub on the loopback, for `tests/assumptions/`.

In: the process's environment (`Hub.environment`). Out: JSON on standard output, name -> observation. No lockstep.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from typing import Any


def chain(error: BaseException | None) -> list[str]:
    """Class names of an error and its causes."""
    names: list[str] = []
    while error is not None:
        names += [kind.__name__ for kind in type(error).__mro__]
        error = error.__cause__ or error.__context__
    return names


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        response = getattr(error, "response", None)
        return {
            "kinds": chain(error),
            "status": getattr(response, "status_code", None),
            "said": getattr(error, "server_message", None),
            "seconds": time.monotonic() - began,
        }
    return {"kinds": [], "status": None, "said": None, "seconds": time.monotonic() - began}


def errors() -> dict[str, Any]:
    from huggingface_hub import HfApi, constants, get_session, hf_hub_download, snapshot_download
    from huggingface_hub.utils import http_backoff, http_stream_backoff

    api = HfApi()
    seen = {
        "file": outcome(lambda: hf_hub_download("user/model", "absent.json")),
        "file not here": outcome(lambda: hf_hub_download("user/model", "absent.json", local_files_only=True)),
        "repository": outcome(lambda: api.model_info("user/absent")),
        "gated": outcome(lambda: hf_hub_download("user/gated", "config.json")),
        "revision": outcome(lambda: api.model_info("user/model", revision="absent")),
        "unavailable": outcome(lambda: api.whoami()),
    }
    session: Any = get_session()
    session.timeout = 1.0
    seen["same session"] = get_session() is session
    seen["silent"] = outcome(lambda: api.whoami())
    for decorated in (http_backoff, http_stream_backoff):
        function = inspect.unwrap(decorated)
        seen[f"{function.__name__} has max_retries"] = "max_retries" in (function.__kwdefaults__ or {})
        function.__kwdefaults__ = (function.__kwdefaults__ or {}) | {"max_retries": 0}
    api.endpoint = constants.ENDPOINT = "http://127.0.0.1:9"
    seen["unreachable"] = outcome(lambda: api.dataset_info("user/rows"))
    seen["unreachable request"] = outcome(lambda: http_backoff("GET", constants.ENDPOINT))
    seen["unreachable stream"] = outcome(lambda: http_stream_backoff("GET", constants.ENDPOINT).__enter__())
    seen["unreachable file"] = outcome(lambda: snapshot_download("user/rows", repo_type="dataset"))
    constants.HF_HUB_OFFLINE = True
    seen["offline"] = outcome(lambda: hf_hub_download("user/model", "absent.json", force_download=True))
    return seen


def reading() -> dict[str, Any]:
    from huggingface_hub import HfApi, get_safetensors_metadata, hf_hub_download
    from huggingface_hub.hf_api import RepoFile
    from transformers.utils import cached_file

    api = HfApi()
    entries = list(api.list_repo_tree("user/rows", None, recursive=True, repo_type="dataset", revision=None))
    files = {e.path: [e.size, e.blob_id] for e in entries if isinstance(e, RepoFile)}
    absent = api.get_paths_info("user/rows", ["absent"], repo_type="dataset", revision=None)
    header = get_safetensors_metadata("user/model", revision=None).files_metadata
    shapes = {name: list(t.shape) for file in header.values() for name, t in file.tensors.items()}
    path = hf_hub_download("user/model", "config.json", revision="main")
    quiet = dict.fromkeys(("gated_repo", "missing_entries", "connection_errors"), False)
    options: dict[str, Any] = {f"_raise_exceptions_for_{what}": no for what, no in quiet.items()}
    return {
        "files": files,
        "absent": list(absent),
        "shapes": shapes,
        "path": path,
        "text": open(path, encoding="utf-8").read(),
        "sha": api.dataset_info("user/rows", revision=None).sha,
        "cached": [
            cached_file(*words, **options) is None
            for words in (
                ("user/model", "absent.json"),
                ("user/gated", "config.json"),
                ("user/model", "config.json"),
            )
        ],
    }


def writing() -> dict[str, Any]:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    api = HfApi()
    for private in (True, False):  # the second time it exists
        api.create_repo("user/new", private=private, exist_ok=True)
    about = api.model_info("user/new")
    seen: dict[str, Any] = {"private": about.private, "before": [each.rfilename for each in about.siblings or []]}
    weights = b"w" * 100_000
    first: list[Any] = [
        CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"one\n"),
        CommitOperationAdd(path_in_repo="model.safetensors", path_or_fileobj=weights),
    ]
    second: list[Any] = [
        CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"two\n"),
        CommitOperationDelete(path_in_repo="model.safetensors"),
    ]
    for operations in (first, second):
        commit = api.create_commit("user/new", operations, commit_message="made")
        seen.setdefault("commits", []).append(str(commit.oid))
    titles = api.get_paths_info("user/new", ["README.md", "absent"], expand=True)
    seen["titles"] = [[each.path, each.last_commit.title if each.last_commit else None] for each in titles]
    (plain,) = api.get_paths_info("user/new", ["README.md"])
    seen["titles"].append([plain.path, plain.last_commit])
    session: Any = get_session()
    for name in ("README.md", "absent"):
        answer = session.get(f"{api.endpoint}/user/new/resolve/main/{name}", headers=build_hf_headers(), timeout=60)
        seen[f"raised for {name}"] = outcome(lambda answer=answer: hf_raise_for_status(answer))["kinds"][:1]
    seen["after"] = sorted(each.rfilename for each in api.model_info("user/new").siblings or [])
    return seen


if __name__ == "__main__":
    print(json.dumps({"reading": reading(), "writing": writing(), "errors": errors()}))
