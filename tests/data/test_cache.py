"""The token cache: damaged data, or data that another user could have written, is never trained on."""

import ast
import errno
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lockstep.config.run import RunError
from lockstep.data import cache, source
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.prepare import prepare
from support.caches import own_cache, prepared, token_rows
from support.harness import tiny
from support.messages import raises
from support.places import ROOT
from support.task_runs import make, write

__all__ = ["own_cache"]  # fixtures


# -- damage ----------------------------------------------------------------------------------------------------------


def shard(folder: str) -> Path:
    """Return the file with the first examples of a split."""
    return Path(folder) / "00000.arrow"


def zeros_from_a_byte_on(path: Path) -> None:
    """Overwrite the end with zeros, as a power failure leaves a file that was not synced."""
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes(len(content) - 5000))


def cut_between_batches(path: Path) -> None:
    """Truncate to fewer examples, in a file that Arrow reads without an error."""
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table.slice(0, 40))


def another_token(path: Path) -> None:
    """Change one byte of one token, keeping the file's size and number of examples."""
    where = Columns(path.parent).ragged("input_ids").row(3).tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(where)] ^= 1
    path.write_bytes(content)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_seal(path: Path) -> None:
    path.parent.with_name(f"{path.parent.name}.seal").unlink()


@pytest.mark.parametrize("again", [False, True], ids=["found", "from the same tokens"])
@pytest.mark.parametrize("harm", [zeros_from_a_byte_on, cut_between_batches, another_token, half, Path.unlink, no_seal])
def test_damaged_tokens_are_recreated(harm: Callable, again: bool, own_cache: Path, tmp_path: Path) -> None:
    run = make(tmp_path, "documents")
    first = prepared(run)
    wanted = token_rows(first)
    assert len(wanted["train"]) > 60
    harm(shard(first.splits["train"]))
    if again:  # nothing but the tokens is read from the cache
        shutil.rmtree(own_cache / "prepared")
    said: list[str] = []
    found = prepared(run, said)
    assert found == first
    assert token_rows(found) == wanted
    assert said[0].startswith("prepared in ")
    assert ("again because" in said[0]) is not again
    prepared(run, said)
    assert said[1].startswith("from the cache")


@pytest.mark.parametrize("kind", ["packed", "translation", "token_classification"])
def test_cached_tokens_of_every_task_are_checked(kind: str, own_cache: Path, tmp_path: Path) -> None:
    run = make(tmp_path, kind)
    first = prepared(run)
    wanted = token_rows(first)
    another_token(shard(first.splits["validation"]))
    assert token_rows(prepared(run)) == wanted


def test_a_damaged_tokenizer_is_recreated(own_cache: Path) -> None:
    run = tiny()
    first = prepared(run)
    path = Path(first.tokenizer) / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"[MASK]"', b'"[MISK]"'))
    assert prepared(run) == first
    assert path.read_bytes() == content
    # a file that was not there before
    (Path(first.tokenizer) / "special_tokens_map.json").write_text('{"pad_token": "[CLS]"}')
    assert prepared(run) == first
    assert not (Path(first.tokenizer) / "special_tokens_map.json").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_copied_cache_names_its_own_files(
    moved: bool, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, "documents")
    first = prepared(run)
    wanted = token_rows(first)
    copy = tmp_path / "copy of the cache"
    shutil.copytree(own_cache, copy)
    if moved:
        shutil.rmtree(own_cache)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(copy))
    said: list[str] = []
    found = prepared(run, said)
    assert said[0] == f"from the cache in {copy}"
    assert (found.key, token_rows(found)) == (first.key, wanted)
    assert all(place.is_relative_to(copy) for place in found.places)
    assert str(own_cache) not in next((copy / "prepared").glob("*.json")).read_text()


def test_damaged_facts_are_recomputed(own_cache: Path) -> None:
    run = tiny()
    first = prepared(run)
    [path] = (own_cache / "prepared").glob("*.json")
    path.write_text(path.read_text().replace("sadness", "gladness"))
    assert prepared(run) == first


def test_a_large_file_is_read_whole_once_and_then_in_part(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 1000)
    read: list[int] = []
    hashes = cache._hashes
    monkeypatch.setattr(cache, "_hashes", lambda file, blocks: read.append(len(blocks)) or hashes(file, blocks))
    content = np.random.default_rng(0).bytes(100_500)
    path = cache.cached(own_cache / "tokens" / "large", lambda aside: aside.write_bytes(content) and None)
    assert cache.damage(path) is None
    assert cache.damage(path) is None
    assert read == [101, 101, 4]  # read at writing, at the first use, and later
    monkeypatch.setattr(cache, "_boot", lambda: "another start")
    assert cache.damage(path) is None
    assert read[3:] == [101]
    with open(path, "r+b") as file:
        file.seek(50_000)
        file.write(b"another")
    assert cache.damage(path) == "large differs from what was written"


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free space"), (errno.EFBIG, "ulimit -f")])
def test_unwritable_cache_is_reported_with_a_remedy(number: int, remedy: str, own_cache: Path) -> None:
    def full(aside: Path) -> None:
        aside.write_bytes(b"half of it")
        raise OSError(number, os.strerror(number))

    def of_tokenizers(aside: Path) -> None:
        raise Exception(f"{os.strerror(number)} (os error {number})")

    for failing in (full, of_tokenizers):
        with raises("LS2031", remedy, "LOCKSTEP_CACHE"):
            cache.cached(own_cache / "tokens" / "a", failing)
        assert os.listdir(own_cache / "tokens") == []


# -- permissions -----------------------------------------------------------------------------------------------------


def test_a_shared_cache_folder_has_a_folder_per_user(own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    run = tiny()
    first = prepared(run)
    mine = own_cache / f"user-{os.getuid()}"
    assert Path(first.tokenizer).is_relative_to(mine)
    assert {path.name for path in own_cache.iterdir()} == {mine.name}
    assert {oct(path.stat().st_mode & 0o777) for path in (mine, *mine.iterdir())} == {"0o700"}
    mine.chmod(0o770)
    with raises("LS2032"):
        prepared(run)


def test_new_folders_are_this_user_s_alone(own_cache: Path) -> None:
    was = os.umask(0)
    try:
        prepared(tiny())
    finally:
        os.umask(was)
    for path in (own_cache, own_cache / "tokens", own_cache / "tokenizers", own_cache / "prepared"):
        assert oct(path.stat().st_mode & 0o777) == "0o700"


@pytest.mark.skipif(os.getuid() != 0, reason="acts as two users")
def test_two_users_share_a_cache_without_trusting_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each user has separate files there, and never uses another user's file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # not inside a folder that only one user can access
        shared = Path(folder)
        shared.chmod(0o1777)
        monkeypatch.setenv("LOCKSTEP_CACHE", folder)
        (shared / "user-1234").mkdir()
        (shared / "user-1234").chmod(0o777)  # another user created it before user 1234 came
        for user, wanted in ((1234, 2), (1235, 0)):
            pid = os.fork()
            if pid == 0:
                status = 9
                try:
                    os.setuid(user)
                    with cache.locked("anything"):
                        status = 0
                except RunError as error:
                    status = 2 if "is writable by other users" in str(error) else 3
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == wanted
        assert (shared / "user-1235").stat().st_uid == 1235
        path = cache.cached(shared / "user-0" / "tokens" / "a", lambda aside: aside.write_bytes(b"mine") and None)
        os.chown(path, 1235, -1)
        assert cache.damage(path) == "a belongs to another user"


def test_an_unwritable_cache_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file" / "cache"))
    with raises("LS2030"):
        prepared(tiny())


def test_tokens_of_a_users_task_are_sealed(own_cache: Path, tmp_path: Path) -> None:
    from lockstep.tasks.language_modeling import LanguageModeling

    class Own(LanguageModeling):
        def prepare(self) -> Prepared:
            found = super().prepare()
            path = own_cache / "tokens" / "own.arrow"
            path.write_bytes(shard(found.splits["train"]).read_bytes())
            return Prepared(found.key, found.splits | {"train": str(path)}, found.tokenizer, found.facts)

    write(tmp_path / "train.jsonl", [{"text": f"a text of {i}"} for i in range(40)])
    run = make(tmp_path, "documents")
    wanted = token_rows(prepare(run, Own))
    assert json.loads((own_cache / "tokens" / "own.arrow.seal").read_text())["files"][""]["rows"] == len(
        wanted["train"]
    )
    half(own_cache / "tokens" / "own.arrow")
    assert token_rows(prepare(run, Own)) == wanted


def test_rows_are_converted_by_the_current_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would return rows cached by an earlier version of the code: labels and spans from before a bug fix."""
    import datasets

    (tmp_path / "rows.jsonl").write_text('{"a": "x"}\n')
    rows = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    # the two versions differ in length: Python detects a changed module by modification time (in seconds) and size
    for ending in ("old", "newer"):
        (tmp_path / "converting_helper.py").write_text(f"def ended(texts): return [t + '-{ending}' for t in texts]\n")
        monkeypatch.delitem(sys.modules, "converting_helper", raising=False)
        helper = importlib.import_module("converting_helper")
        convert = lambda batch, helper=helper: {"a": helper.ended(batch["a"])}  # noqa: E731
        seen += source.map_rows(rows, convert, {"a": datasets.Value("string")})["a"][:]
    assert seen == ["x-old", "x-newer"]


def test_the_map_cache_of_datasets_is_not_used() -> None:
    """Every batched `map` either turns off that cache or keeps its rows in memory."""
    found = []
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "src/lockstep").rglob("*.py"))}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if ".map(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "map":
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                found += [(file.name, options)] if "batched" in options else []
    assert len(found) >= 5
    for name, options in found:
        fresh = options.get("load_from_cache_file") == "False" or options.get("keep_in_memory") == "True"
        assert fresh, f"{name}: {options}"
