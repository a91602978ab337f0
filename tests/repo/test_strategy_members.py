"""Members that a reader of a strategy meets: its own attributes and methods, and those that it inherits."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import plugins

MOST = 45


def members(cls: type) -> set[str]:
    """Attributes that a class and its bases define or declare, public and private, but for Python's own."""
    ours = [each for each in cls.__mro__ if each.__module__.startswith("lockstep")]
    names = {name for each in ours for name in (*vars(each), *vars(each).get("__annotations__", {}))}
    return {name for name in names if name == "__init__" or not name.startswith(("__", "_abc_"))}


def every_class() -> list[Any]:
    """The strategies of the run file, and the classes that stand for one with some options."""
    from lockstep.strategies.engines.accelerated_sharding import AcceleratedFSDP2, AcceleratedZero
    from lockstep.strategies.sharded_optimizer import ShardedOptimizer

    named = [plugins.find("strategies", name) for name in plugins.built_in("strategies")]
    return [*named, ShardedOptimizer, AcceleratedFSDP2, AcceleratedZero]


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__name__)
def test_a_strategy_is_composed_of_parts(cls: type) -> None:
    assert len(members(cls)) <= MOST, sorted(members(cls))


def test_inherited_and_declared_members_count() -> None:
    class Base:
        one: int
        __module__ = "lockstep.base"

        def two(self) -> None: ...

    class Derived(Base):
        _three = 3
        __module__ = "lockstep.derived"

    assert members(Derived) == {"one", "two", "_three"}
