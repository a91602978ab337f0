"""Assumptions about the libraries that read settings, pydantic and PyYAML, and about torch's store."""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest
import torch.distributed as dist
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticKnownError

from support.assumed import rests_on_it


class Wrong(ValueError):
    """A validator's error with its own code."""

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
@rests_on_it(
    "src/lockstep/config/error_messages.py",
    "src/lockstep/config/sections.py",
    "src/lockstep/config/data_sources.py",
    "src/lockstep/config/run.py",
    "src/lockstep/lab/import_config/import_config.py",
    "src/lockstep/lab/sweep/sweep_file.py",
    "src/lockstep/track/history.py",
)
def test_contents_of_validation_errors(values: dict[str, Any], kind: str, context: Any) -> None:
    """pydantic's errors have a type, the bounds in `ctx`, the input unchanged, and the path of the key. The message
    about a bound contains "should be "."""
    (error,) = errors_of(**values)
    ((key, value),) = values.items()
    assert (error["type"], error.get("ctx") or {}, error["loc"]) == (kind, context, ("section", key))
    assert error["input"] == value
    assert not kind.startswith(("greater", "less")) or "should be " in error["msg"]


@rests_on_it("src/lockstep/config/error_messages.py")
def test_paths_of_missing_items_and_keys() -> None:
    """A missing key and a missing item of a tuple both have the type `missing`. The last part of the path is a number
    only for the item."""
    (item,) = errors_of(betas=[1.0])
    assert (item["type"], item["loc"]) == ("missing", ("section", "betas", 1))
    with pytest.raises(ValidationError) as caught:
        Settings(section={})
    (key,) = caught.value.errors()
    assert (key["type"], key["loc"]) == ("missing", ("section", "size"))


@rests_on_it("src/lockstep/config/error_messages.py")
def test_errors_of_unions() -> None:
    """A value that fits no member of a union gives one error per member, whose path ends in the member's type."""
    assert [error["loc"] for error in errors_of(paths=1)] == [
        ("section", "paths", "str"),
        ("section", "paths", "list[str]"),
    ]


@rests_on_it("src/lockstep/config/error_messages.py", "src/lockstep/config/errors.py")
def test_errors_of_validators_are_in_ctx() -> None:
    """A ValueError raised by a validator becomes a `value_error` whose `ctx` holds that exception."""
    (error,) = errors_of(word="wrong")
    assert error["type"] == "value_error"
    assert error["ctx"]["error"].code == "X1"


@rests_on_it(
    "src/lockstep/config/written.py",
    "src/lockstep/config/run.py",
    "src/lockstep/commands/before_a_run.py",
    "src/lockstep/data/hub.py",
    "src/lockstep/data/hub_rows.py",
    "src/lockstep/data/job.py",
    "src/lockstep/data/prepare.py",
    "src/lockstep/data/row_files.py",
    "src/lockstep/data/source.py",
    "src/lockstep/lab/doctor.py",
    "src/lockstep/lab/import_config/import_config.py",
    "src/lockstep/lab/init/detect_layout.py",
    "src/lockstep/lab/init/init.py",
    "src/lockstep/lab/sweep/sweep.py",
    "src/lockstep/proof/against_plain.py",
    "src/lockstep/proof/attest.py",
    "src/lockstep/proof/diff.py",
    "src/lockstep/proof/replay.py",
    "src/lockstep/proof/verify.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/models/head_labels.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/question_answering.py",
    "src/lockstep/tasks/reward.py",
)
def test_model_fields_set_survives_copies() -> None:
    """`model_fields_set` holds the keys that were passed, also those whose value equals the default. `model_copy` adds
    the updated keys, and does not validate."""
    section = Section(size=1, name="one")
    assert section.model_fields_set == {"size", "name"}
    changed = section.model_copy(update={"share": "unchecked"})
    assert changed.model_fields_set == {"size", "name", "share"}
    assert changed.share == "unchecked"


@rests_on_it("src/lockstep/config/error_messages.py")
def test_yaml_1_1_scalars() -> None:
    """PyYAML follows YAML 1.1: `1:4` is 64, `010` is 8, `on` and `no` are booleans, `1e-4` is a string, `1.0e-4` a
    number."""
    read = yaml.safe_load("[1:4, 010, on, no, 1e-4, 1.0e-4, 1_000]")
    assert read == [64, 8, True, False, "1e-4", 1e-4, 1000]


@rests_on_it("src/lockstep/config/error_messages.py")
def test_yaml_duplicate_keys_and_recursive_aliases() -> None:
    """PyYAML silently keeps the last of duplicate keys, and builds a list that contains itself."""
    assert yaml.safe_load("{a: 1, a: 2}") == {"a": 2}
    (inner,) = own = yaml.safe_load("&a [*a]")
    assert inner is own


@rests_on_it(
    "src/lockstep/config/error_messages.py",
    "src/lockstep/launchers/output_lock.py",
    "src/lockstep/config/run.py",
    "src/lockstep/lab/import_config/table.py",
    "src/lockstep/lab/sweep/sweep_file.py",
    "src/lockstep/track/history.py",
)
def test_yaml_errors() -> None:
    """PyYAML's syntax errors are YAMLErrors with a line; a date that does not exist raises a plain ValueError."""
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("a: 1\nb: [")
    assert caught.value.problem_mark.line == 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="month"):
        yaml.safe_load("2026-13-01")


@rests_on_it("src/lockstep/config/key_aliases.py")
def test_libyaml_agrees_with_the_python_loader() -> None:
    """The wheels include `yaml.CSafeLoader`, which gives the same values as `SafeLoader`."""
    text = "a: [1, 2.5, on, ~, 'x']\nb: |\n  two\n  lines\n"
    assert yaml.load(text, Loader=yaml.CSafeLoader) == yaml.safe_load(text)


class Sizes(BaseModel):
    """Keys of several types, plus extra keys as plug-ins may have."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    some: str | bool | int | float | None = None
    least: int | float | None = None
    count: int = 1
    rate: float = 0.5
    pair: tuple[int, int] = (1, 2)
    section: Section = Field(default_factory=lambda: Section(size=1))


@rests_on_it(
    "src/lockstep/config/data_sources.py",
    "src/lockstep/config/sections.py",
    "src/lockstep/data/job.py",
    "src/lockstep/lab/sweep/sweep_file.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/track/json_output.py",
    "src/lockstep/track/tracker.py",
)
def test_unions_keep_the_type_of_a_value() -> None:
    """A union chooses the member with the value's type: a string of digits stays a string, 1 an integer, 1.0 a float
    and true a boolean. A plain int field accepts "1" and 1.0, rejects 1.5, and converts true to 1, which lockstep
    refuses. allow_inf_nan=False rejects infinity and NaN."""
    for value in ("1", 1, 1.0, True, None):
        made = Sizes(some=value).some
        assert (made, type(made)) == (value, type(value))
    assert [type(Sizes(least=value).least) for value in (1, 1.0)] == [int, float]
    assert [Sizes.model_validate({"count": value}).count for value in ("1", 1.0, True)] == [1, 1, 1]
    for wrong, kind in (({"count": 1.5}, "int_from_float"), ({"rate": float("inf")}, "finite_number")):
        with pytest.raises(ValidationError) as caught:
            Sizes.model_validate(wrong)
        assert [error["type"] for error in caught.value.errors()] == [kind]


@rests_on_it(
    "src/lockstep/config/sections.py",
    "src/lockstep/config/data_sources.py",
    "src/lockstep/config/model_selection.py",
    "src/lockstep/config/run.py",
    "src/lockstep/lab/sweep/sweep_file.py",
    "src/lockstep/tasks/answer_pairs.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/tasks/objectives/objective.py",
    "src/lockstep/tasks/preference.py",
)
def test_validators_for_all_keys() -> None:
    """field_validator("*", mode="before") runs for each passed key, with its name in info.field_name, in subclasses
    too. A PydanticKnownError becomes an error of its type. A model validator in mode before receives the raw
    mapping."""
    names = []

    class First(BaseModel):
        @model_validator(mode="before")
        @classmethod
        def _bare(cls, values: Any) -> Any:
            return {key: value for key, value in values.items() if value is not None}

        @field_validator("*", mode="before", check_fields=False)
        @classmethod
        def _each(cls, value: Any, info: ValidationInfo) -> Any:
            names.append(info.field_name)
            if value is True:
                raise PydanticKnownError("int_type")
            return value

    class Second(First):
        size: int = 0
        other: int = 0

    with pytest.raises(ValidationError) as caught:
        Second.model_validate({"size": True, "other": None})
    assert ([error["type"] for error in caught.value.errors()], names) == (["int_type"], ["size"])


@rests_on_it(
    "src/lockstep/config/sections.py",
    "src/lockstep/config/written.py",
    "src/lockstep/config/run.py",
    "src/lockstep/config/data_sources.py",
    "src/lockstep/config/error_messages.py",
    "src/lockstep/data/job.py",
    "src/lockstep/lab/import_config/import_config.py",
    "src/lockstep/lab/import_config/table.py",
    "src/lockstep/lab/init/detect_layout.py",
    "src/lockstep/lab/init/init.py",
    "src/lockstep/lab/init/questions.py",
    "src/lockstep/proof/replay.py",
    "src/lockstep/tasks/answer_pairs.py",
    "src/lockstep/tasks/objectives/objective.py",
)
def test_model_fields_and_extra_keys() -> None:
    """model_fields of a class has its keys in order, with annotation, is_required and get_default, which calls a
    default factory. Extra keys are in __pydantic_extra__ and in model_fields_set. Assigning to a frozen model raises a
    ValidationError."""
    fields = Sizes.model_fields
    assert list(fields) == ["some", "least", "count", "rate", "pair", "section"]
    assert (fields["count"].annotation, fields["count"].is_required()) == (int, False)
    assert Section.model_fields["size"].is_required()
    assert fields["section"].get_default(call_default_factory=True) == Section(size=1)
    made = Sizes.model_validate({"rank": 3})
    assert (made.__pydantic_extra__, made.model_fields_set) == ({"rank": 3}, {"rank"})
    with pytest.raises(ValidationError):
        made.count = 2


@rests_on_it(
    "src/lockstep/config/run.py",
    "src/lockstep/config/data_sources.py",
    "src/lockstep/config/model_selection.py",
    "src/lockstep/data/job.py",
    "src/lockstep/data/prepare.py",
    "src/lockstep/data/source.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/lab/bench.py",
    "src/lockstep/lab/bench_options.py",
    "src/lockstep/lab/branch.py",
    "src/lockstep/lab/init/questions.py",
    "src/lockstep/lab/sweep/sweep_file.py",
    "src/lockstep/proof/against_plain.py",
    "src/lockstep/proof/replay.py",
    "src/lockstep/tasks/classification.py",
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/track/json_output.py",
    "src/lockstep/track/tracker.py",
)
def test_model_dump_and_json_schema() -> None:
    """model_dump has all keys, extra ones last. With mode="json" tuples become lists. exclude leaves out keys. A
    model_serializer in mode wrap receives the default result. model_json_schema has properties and, by name, $defs."""

    class Given(Sizes):
        @model_serializer(mode="wrap")
        def _given(self, write: Any) -> dict[str, Any]:
            return {key: value for key, value in write(self).items() if value is not None}

    made = Sizes.model_validate({"rank": 3})
    assert made.model_dump()["pair"] == (1, 2)
    dumped = made.model_dump(mode="json", exclude={"section"})
    assert dumped == {"some": None, "least": None, "count": 1, "rate": 0.5, "pair": [1, 2], "rank": 3}
    assert list(dumped)[-1] == "rank"
    assert Given.model_validate({"rank": 3}).model_dump(exclude={"section", "pair"}) == {
        "count": 1,
        "rate": 0.5,
        "rank": 3,
    }
    schema = Sizes.model_json_schema()
    assert list(schema["properties"]) == list(Sizes.model_fields)
    assert "size" in schema["$defs"]["Section"]["properties"]


@rests_on_it("src/lockstep/config/error_messages.py", "src/lockstep/config/key_aliases.py")
def test_a_yaml_loader_subclass_sees_each_node() -> None:
    """A subclass of SafeLoader sees each node in compose_node, aliases as separate events, and builds it in
    construct_object. Its resolvers are its own. get_single_node and construct_document read a text in two steps; the
    second resolves merge keys. A MarkedYAMLError has its problem and mark."""
    events, built = [], []

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            events.append(type(self.peek_event()).__name__)
            return super().compose_node(parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            built.append(node.tag.rpartition(":")[2])
            return super().construct_object(node, deep)

    assert yaml.load("a: &x [1]\nb: *x", Loader=Loader) == {"a": [1], "b": [1]}
    assert events == [
        "MappingStartEvent",
        "ScalarEvent",
        "SequenceStartEvent",
        "ScalarEvent",
        "ScalarEvent",
        "AliasEvent",
    ]
    assert built.count("seq") >= 1
    Loader.yaml_implicit_resolvers = {
        key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("^one$"), ["o"])
    assert yaml.safe_load("one") == "one"
    loader = yaml.SafeLoader("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n")
    root = loader.get_single_node()
    assert [key.start_mark.line for key, _ in root.value] == [0, 1]
    assert loader.construct_document(root) == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
    error: Any = yaml.MarkedYAMLError(problem="wrong", problem_mark=root.start_mark)
    assert (error.problem, error.problem_mark.line, error.problem_mark.column) == ("wrong", 0, 0)


@rests_on_it("src/lockstep/config/error_messages.py", "src/lockstep/lab/sweep/sweep_file.py")
def test_yaml_round_trips() -> None:
    """safe_dump quotes strings that look like another type, writes floats so that they are read as floats, and refuses
    objects of other classes. It writes letters unchanged with allow_unicode, and escapes them without."""
    values = [
        "no",
        "1",
        "1.0",
        "1:4",
        "1e-4",
        "null",
        "~",
        "",
        " a",
        "a: b",
        "#",
        "2024-01-01",
        "\ud83d\ude00",
        "\u00e9\n",
    ]
    values += [1e-5, 1e300, float("inf"), 0.1, 2**70, True, None, [], {}, {"on": "off"}]  # type: ignore[list-item]
    for options in ({}, {"allow_unicode": True, "sort_keys": False, "default_flow_style": True, "width": 10**6}):
        for value in values:
            assert yaml.safe_load(yaml.safe_dump({"x": value}, **options)) == {"x": value}  # type: ignore[call-overload]
    assert (yaml.safe_dump("\u00e9"), yaml.safe_dump("\u00e9", allow_unicode=True)) == ('"\\xE9"\n', "\u00e9\n...\n")
    assert yaml.safe_dump({"b": 1, "a": 2}) == "a: 2\nb: 1\n"
    with pytest.raises(yaml.YAMLError):
        yaml.safe_dump((1, object()))


@rests_on_it("src/lockstep/config/plugins.py")
def test_versions_are_compared_by_their_parts() -> None:
    """packaging compares 2.9 and 2.13 as versions; a version with a local part is later. A Requirement has a name,
    extras, a marker that can be evaluated, and a specifier of operators and versions."""
    assert Version("2.9") < Version("2.13") < Version("2.13+cpu") < Version("2.13.1")
    assert Version("2.14.0rc1") < Version("2.14")
    needed = Requirement("torch[a]>=2.11,<2.14; python_version >= '3.0'")
    assert (needed.name, needed.extras) == ("torch", {"a"})
    assert needed.marker is not None
    assert needed.marker.evaluate()
    assert {(each.operator, each.version) for each in needed.specifier} == {(">=", "2.11"), ("<", "2.14")}


# -- torch's store --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))


@rests_on_it("src/lockstep/distributed/rendezvous.py", "src/lockstep/distributed/membership.py")
def test_compare_set_returns_the_value_afterwards(store: dist.TCPStore) -> None:
    """`compare_set` that expects the empty string sets a missing key, and returns the value afterwards: the first
    caller's, for every caller."""
    assert store.compare_set("first", "", "mine") == b"mine"
    assert store.compare_set("first", "", "theirs") == b"mine"
    assert store.compare_set("first", "mine", "next") == b"next"
    assert store.get("first") == b"next"


@rests_on_it("src/lockstep/distributed/rendezvous.py")
def test_compare_set_of_a_missing_key_sets_nothing(store: dist.TCPStore) -> None:
    """`compare_set` of a missing key with a nonempty expected value sets nothing, returns the expected value, and does
    not raise."""
    assert store.compare_set("nobody", "something", "mine") == b"something"
    assert not store.check(["nobody"])


@rests_on_it("src/lockstep/distributed/membership.py", "src/lockstep/launchers/processes/elastic_rendezvous.py")
def test_check_does_not_wait(store: dist.TCPStore) -> None:
    """`check` returns at once whether all keys exist; for an empty list it returns True."""
    store.set("here", "1")
    assert store.check(["here"])
    assert not store.check(["here", "missing"])
    assert store.check([])


@rests_on_it("src/lockstep/launchers/processes/elastic_rendezvous.py", "src/lockstep/distributed/rendezvous.py")
def test_add_creates_a_counter(store: dist.TCPStore) -> None:
    """`add` of 0 makes a missing counter and returns 0; a counter is stored as decimal text."""
    assert store.add("count", 0) == 0
    assert store.check(["count"])
    assert store.add("count", 3) == 3
    assert store.get("count") == b"3"


@rests_on_it("src/lockstep/distributed/rendezvous.py")
def test_multi_get_keeps_the_order_of_keys(store: dist.TCPStore) -> None:
    """`multi_get` returns values in the order of its keys, byte for byte, also through a prefix."""
    below = dist.PrefixStore("a", store)
    below.multi_set(["x", "y"], [b"\x00\xff", b""])
    assert below.multi_get(["y", "x"]) == [b"", b"\x00\xff"]
    assert store.get("a/x") == b"\x00\xff"


@rests_on_it("src/lockstep/distributed/rendezvous.py", "src/lockstep/distributed/membership.py")
def test_get_of_a_missing_key_times_out(store: dist.TCPStore) -> None:
    """`get` of a missing key raises DistStoreError, not a plain RuntimeError, after the store's timeout."""
    with pytest.raises(dist.DistStoreError):
        store.get("never")


@rests_on_it("src/lockstep/distributed/rendezvous.py", "src/lockstep/distributed/hang_watchdog.py")
def test_a_store_serves_on_a_listening_socket() -> None:
    """A master TCPStore with wait_for_workers False serves on the socket in master_listen_fd at once, and `port` is
    that socket's port. A clone of a PrefixStore is another connection with the same prefix. A string is stored as its
    bytes."""
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
