"""Conditions on the rows of a data set, by column: what `data.filter` is made of.

In: `{language: en, source: [web, books], text: {min_words: 3}}`. Out: the same, typed, or a `ValueError` that says what
a condition may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_serializer

Scalar = bool | int | float | str
Count = Annotated[int, Field(ge=0)]
_MAY_BE = "a value, a list of values, or a mapping with some of"


class Condition(BaseModel):
    """What a value has to be, for its row to be used: all that is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    min: int | float | None = Field(None, description="the least that a number may be")
    max: int | float | None = Field(None, description="the most that a number may be")
    none_of: list[Scalar] | None = Field(None, min_length=1, description="values that it may not be")
    min_characters: Count | None = Field(None, description="the least characters that a text may have")
    max_characters: Count | None = Field(None, description="the most characters that a text may have")
    min_words: Count | None = Field(None, description="the least words of a text, or items of a list")
    max_words: Count | None = Field(None, description="the most words of a text, or items of a list")
    min_tokens: Count | None = Field(None, description="the least tokens that the run's tokenizer makes of a text")
    max_tokens: Count | None = Field(None, description="the most tokens that the run's tokenizer makes of a text")

    @model_serializer(mode="wrap")
    def _what_is_given(self, write: Any) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}

    @property
    def counts_tokens(self) -> bool:
        """Whether a tokenizer is needed to tell if it holds."""
        return self.min_tokens is not None or self.max_tokens is not None

    @property
    def given(self) -> dict[str, Any]:
        """Its keys that say something."""
        return self.model_dump()


def _explained(values: Any) -> Any:
    """Errors: `ValueError`, in words that pydantic has not for a choice of types."""
    if not isinstance(values, Mapping):
        raise ValueError(f"wanted is a mapping of columns, such as {{language: en}}, and not {values!r}")
    allowed = f"{_MAY_BE} {', '.join(Condition.model_fields)}"
    for column, value in values.items():
        if isinstance(value, Condition):
            continue
        listed = value if isinstance(value, list) else [value]
        if isinstance(value, Mapping):
            _check(column, value, allowed)
        elif not listed or not all(isinstance(each, Scalar) for each in listed):
            raise ValueError(f"{column}: {value!r} is no condition; it is {allowed}")
    return values


def _check(column: Any, value: Mapping[str, Any], allowed: str) -> None:
    """Errors: `ValueError`."""
    try:
        given = Condition.model_validate(value).given
    except ValidationError as error:
        wrong = ".".join(str(part) for part in error.errors()[0]["loc"][:1])
        if wrong not in Condition.model_fields:
            raise ValueError(f"{column}: there is no condition {wrong!r}; it is {allowed}") from None
        about = Condition.model_fields[wrong].description
        raise ValueError(f"{column}: {wrong}: {value[wrong]!r} will not do: {about}") from None
    if not given:
        raise ValueError(f"{column}: {{}} is no condition; it is {allowed}")
    for what in ("", "_characters", "_words", "_tokens"):
        low, high = given.get(f"min{what}"), given.get(f"max{what}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"{column}: min{what} ({low}) is more than max{what} ({high}): no row would be left")


Filter = Annotated[
    dict[str, Scalar | Annotated[list[Scalar], Field(min_length=1)] | Condition], BeforeValidator(_explained)
]
