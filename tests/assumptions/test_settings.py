"""What lockstep assumes about the libraries that read settings, pydantic and PyYAML, and about torch's store."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest
import torch.distributed as dist
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from support.assumed import rests_on_it


class Wrong(ValueError):
    """An error of a validator, with a code of its own."""

    code = "X1"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[int, Field(gt=0)]
    share: float | None = Field(0.5, le=1)
    name: Literal["one", "two"] = "one"
    betas: tuple[float, float] = (0.9, 0.99)
    paths: str | list[str] = "a"
    word: Annotated[str, Field(pattern="^[a-z]+$")] = "a"

    @field_validator("word")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "wrong":
            raise Wrong("no such word")
        return value


class Settings(BaseModel):
    section: Section


def errors_of(**values: Any) -> list[Any]:
    with pytest.raises(ValidationError) as caught:
        Settings(section={"size": 1} | values)
    return list(caught.value.errors())


@pytest.mark.parametrize(
    ("values", "kind", "context"),
    [
        ({"size": "many"}, "int_parsing", {}),
        ({"size": 0}, "greater_than", {"gt": 0}),
        ({"size": None}, "int_type", {}),
        ({"share": 2}, "less_than_equal", {"le": 1.0}),
        ({"name": "three"}, "literal_error", {"expected": "'one' or 'two'"}),
        ({"word": "A"}, "string_pattern_mismatch", {"pattern": "^[a-z]+$"}),
        ({"betas": [1.0, 2.0, 3.0]}, "too_long", {"field_type": "Tuple", "max_length": 2, "actual_length": 3}),
        ({"other": 1}, "extra_forbidden", {}),
    ],
)
@rests_on_it("src/lockstep/config/error_messages.py", "src/lockstep/config/sections.py")
def test_an_error_has_a_type_its_bounds_and_the_place(values: dict[str, Any], kind: str, context: Any) -> None:
    """pydantic's errors name the kind of fault, its bounds in `ctx`, the input as it was written, and the path of the
    key; the message of a bound contains "should be "."""
    (error,) = errors_of(**values)
    ((key, value),) = values.items()
    assert (error["type"], error.get("ctx") or {}, error["loc"]) == (kind, context, ("section", key))
    assert error["input"] == value
    assert not kind.startswith(("greater", "less")) or "should be " in error["msg"]


@rests_on_it("src/lockstep/config/error_messages.py")
def test_a_missing_item_of_a_pair_has_its_index_and_a_missing_key_its_name() -> None:
    """A missing key and a missing item of a tuple are both of the type `missing`; the last part of the path is a number
    for the item only."""
    (item,) = errors_of(betas=[1.0])
    assert (item["type"], item["loc"]) == ("missing", ("section", "betas", 1))
    with pytest.raises(ValidationError) as caught:
        Settings(section={})
    (key,) = caught.value.errors()
    assert (key["type"], key["loc"]) == ("missing", ("section", "size"))


@rests_on_it("src/lockstep/config/error_messages.py")
def test_every_member_of_a_union_has_an_error_with_its_type_in_the_path() -> None:
    """A value that fits no member of a union gives an error for each member, whose path ends in the member's type."""
    assert [error["loc"] for error in errors_of(paths=1)] == [
        ("section", "paths", "str"),
        ("section", "paths", "list[str]"),
    ]


@rests_on_it("src/lockstep/config/error_messages.py", "src/lockstep/config/errors.py")
def test_the_error_of_a_validator_is_held_as_it_is() -> None:
    """A ValueError of a validator becomes a `value_error` whose `ctx` holds the very exception."""
    (error,) = errors_of(word="wrong")
    assert error["type"] == "value_error"
    assert error["ctx"]["error"].code == "X1"


@rests_on_it("src/lockstep/config/written.py", "src/lockstep/config/run.py")
def test_what_was_set_is_told_from_defaults_also_in_a_copy() -> None:
    """`model_fields_set` holds the keys that were given, also those whose value equals the default; `model_copy` adds
    what it updates, and does not validate it."""
    section = Section(size=1, name="one")
    assert section.model_fields_set == {"size", "name"}
    changed = section.model_copy(update={"share": "unchecked"})
    assert changed.model_fields_set == {"size", "name", "share"}
    assert changed.share == "unchecked"


@rests_on_it("src/lockstep/config/error_messages.py")
def test_yaml_reads_base_60_octals_and_words_as_1_1_has_them() -> None:
    """PyYAML follows YAML 1.1: `1:4` is 64, `010` is 8, `on` and `no` are booleans, `1e-4` is a text, `1.0e-4` a
    number."""
    read = yaml.safe_load("[1:4, 010, on, no, 1e-4, 1.0e-4, 1_000]")
    assert read == [64, 8, True, False, "1e-4", 1e-4, 1000]


@rests_on_it("src/lockstep/config/error_messages.py")
def test_yaml_takes_the_last_of_equal_keys_and_follows_recursive_aliases() -> None:
    """PyYAML keeps the last of duplicate keys without a word, and builds a list that contains itself."""
    assert yaml.safe_load("{a: 1, a: 2}") == {"a": 2}
    (inner,) = own = yaml.safe_load("&a [*a]")
    assert inner is own


@rests_on_it("src/lockstep/config/error_messages.py", "src/lockstep/launchers/processes/output_lock.py")
def test_yaml_errors_are_of_one_class_but_for_values_that_cannot_be_built() -> None:
    """PyYAML's errors of form are YAMLErrors with a line; a date that does not exist is a bare ValueError."""
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("a: 1\nb: [")
    assert caught.value.problem_mark.line == 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="month"):
        yaml.safe_load("2026-13-01")


@rests_on_it("src/lockstep/config/key_aliases.py")
def test_libyaml_reads_what_the_slow_loader_reads() -> None:
    """`yaml.CSafeLoader` is there in the wheels, and gives the same values as `SafeLoader`."""
    text = "a: [1, 2.5, on, ~, 'x']\nb: |\n  two\n  lines\n"
    assert yaml.load(text, Loader=yaml.CSafeLoader) == yaml.safe_load(text)


# -- torch's store --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))


@rests_on_it("src/lockstep/distributed/rendezvous.py", "src/lockstep/distributed/membership.py")
def test_compare_set_returns_what_stands_afterwards(store: dist.TCPStore) -> None:
    """`compare_set` with an empty expectation sets a key that is missing, and returns the value afterwards: the first
    caller's, for every caller."""
    assert store.compare_set("first", "", "mine") == b"mine"
    assert store.compare_set("first", "", "theirs") == b"mine"
    assert store.compare_set("first", "mine", "next") == b"next"
    assert store.get("first") == b"next"


@rests_on_it("src/lockstep/distributed/rendezvous.py")
def test_compare_set_of_a_missing_key_returns_the_expectation_and_sets_nothing(store: dist.TCPStore) -> None:
    """`compare_set` of a key that is missing, with another expectation than the empty one, sets nothing and returns the
    expectation; it does not fail."""
    assert store.compare_set("nobody", "something", "mine") == b"something"
    assert not store.check(["nobody"])


@rests_on_it("src/lockstep/distributed/membership.py", "src/lockstep/launchers/processes/elastic_rendezvous.py")
def test_a_check_does_not_wait_and_is_of_all_keys(store: dist.TCPStore) -> None:
    """`check` returns at once, and is true only if every key is there; of no keys it is true."""
    store.set("here", "1")
    assert store.check(["here"])
    assert not store.check(["here", "missing"])
    assert store.check([])


@rests_on_it("src/lockstep/launchers/processes/elastic_rendezvous.py", "src/lockstep/distributed/rendezvous.py")
def test_a_counter_is_a_text_that_adding_nothing_makes(store: dist.TCPStore) -> None:
    """`add` of 0 makes a missing counter and returns 0; a counter is stored as decimal text."""
    assert store.add("count", 0) == 0
    assert store.check(["count"])
    assert store.add("count", 3) == 3
    assert store.get("count") == b"3"


@rests_on_it("src/lockstep/distributed/rendezvous.py")
def test_many_values_come_in_the_order_of_the_keys(store: dist.TCPStore) -> None:
    """`multi_get` returns values in the order of its keys, byte for byte, also through a prefix."""
    below = dist.PrefixStore("a", store)
    below.multi_set(["x", "y"], [b"\x00\xff", b""])
    assert below.multi_get(["y", "x"]) == [b"", b"\x00\xff"]
    assert store.get("a/x") == b"\x00\xff"


@rests_on_it("src/lockstep/distributed/rendezvous.py", "src/lockstep/distributed/membership.py")
def test_a_key_that_never_comes_is_an_error_of_its_kind(store: dist.TCPStore) -> None:
    """`get` of a missing key raises DistStoreError after the store's timeout, not a bare RuntimeError."""
    with pytest.raises(dist.DistStoreError):
        store.get("never")


@rests_on_it("src/lockstep/distributed/rendezvous.py", "src/lockstep/distributed/hang_watchdog.py")
def test_a_store_takes_a_socket_that_listens_and_has_clones() -> None:
    """A master TCPStore with wait_for_workers False serves on the socket in master_listen_fd at once, and `port` is its
    port; a clone of a PrefixStore is another connection with the same prefix; a text is stored as its bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        file = listener.detach()
    options: dict[str, Any] = {"timeout": timedelta(seconds=5), "wait_for_workers": False}
    served = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=file, **options)
    assert served.port == port
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    below = dist.PrefixStore("room", client)
    clone = below.clone()
    clone.set("é", "é")
    assert below.get("é") == "é".encode()
    assert served.get("room/é") == "é".encode()
    del below, client
    assert clone.check(["é"])
