"""The keys of `classification` in the run file, and what of them does not go together.

In: the task section. Out: frozen options. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _named(value: Any) -> Any:
    """Weights by label, as texts: YAML reads 0 and true as a number and a truth."""
    if not isinstance(value, dict):
        return value
    return {str(name).lower() if isinstance(name, bool) else str(name): weight for name, weight in value.items()}


Weight = Annotated[float, Field(ge=1e-5, le=1e6)]
Weights = Annotated[Literal["balanced"] | dict[str, Weight] | None, BeforeValidator(_named)]
Threshold = Annotated[float, Field(gt=0, lt=1)] | Literal["validation"] | None


class LabelOptions(BaseModel):
    """The keys of every task that learns labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    label_names: list[str] | None = Field(
        None, description="names of integer labels, in order; default: from the data set"
    )
    focal_gamma: float = Field(2.0, ge=0, description="how much less an example counts that is right already: focal")
    class_weights: Weights = Field(
        None, description="balanced, or label -> weight in the training loss; labels not named have 1"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="of the training loss")
    threshold: Threshold = Field(
        None,
        description="probability from which on a label is given; validation: that of the best F1 there, which is the "
        "default with multi_label. With two labels: of the second one; default: the likelier one",
    )
    samples: int = Field(3, ge=0, description="predictions to show after each evaluation")


class ClassificationOptions(LabelOptions):
    """The task's own keys in the run file."""

    text: str = Field("text", description="column of the text")
    text_pair: str | None = Field(None, description="column of a second text, for questions about pairs")
    label: str | list[str] = Field(
        "label",
        description="column of the label: integers, strings, or true and false; lists of them, or several columns of 0 "
        "and 1, with multi_label; numbers, or several columns of them, with regression",
    )
    multi_label: bool = Field(False, description="a text has any number of labels, each learned as yes or no")
    regression: bool = Field(False, description="a text has a number, or several, instead of a label")
    loss: Literal["cross_entropy", "focal", "mse", "mae"] | None = Field(
        None, description="of training; default: cross_entropy (binary with multi_label), mse with regression"
    )

    @property
    def columns(self) -> dict[str, str]:
        """Key of the run file -> the column of texts that it names."""
        pair = {} if self.text_pair is None else {"task.text_pair": self.text_pair}
        return {"task.text": self.text} | pair

    @property
    def labels(self) -> dict[str, str]:
        """Key of the run file -> the column of labels or numbers that it names."""
        given = [self.label] if isinstance(self.label, str) else self.label
        return {"task.label" if len(given) == 1 else f"task.label[{i}]": column for i, column in enumerate(given)}

    @model_validator(mode="after")
    def _together(self) -> ClassificationOptions:
        if self.multi_label and self.regression:
            raise ValueError("give multi_label or regression, and not both")
        if not self.labels or len({*self.labels.values()}) < len(self.labels):
            raise ValueError(f"label is one column, or several different ones, and not {self.label!r}")
        if len(self.labels) > 1 and not (self.multi_label or self.regression):
            raise ValueError(
                "several columns in label go with multi_label or regression; one label a text has one column"
            )
        wanted = ("mse", "mae") if self.regression else ("cross_entropy", "focal")
        if self.loss not in (None, *wanted):
            what = "numbers (regression)" if self.regression else "labels; for numbers set regression"
            raise ValueError(f"loss {self.loss!r} is none of {' and '.join(wanted)}, which are those of {what}")
        if self.regression:
            for key in ("class_weights", "label_smoothing", "threshold"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is about labels, and with regression there are none; leave it out")
        if self.loss == "focal" and self.label_smoothing:
            raise ValueError("label_smoothing does not go with the focal loss, of which nobody has a form with it")
        return self
