"""Samples for a terminal: what the model makes of an example, as a text or cut to one line.

In: a sample, text by column. Out: a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size


def joined(sample: Mapping[str, str]) -> str:
    """The whole sample: the first column, what the model makes of it, the others: `text ⟶ predicted (label: true)`."""
    return _joined(list(sample), list(sample.values()))


def on_a_line(sample: Mapping[str, str], room: int) -> str:
    """The sample on one line of at most `room` columns, for which the longest of its texts are cut (to no less than
    eight columns each)."""
    names, values = list(sample), [" ".join(value.split()) for value in sample.values()]
    for most in range(min(room, max(map(cell_len, values), default=0)), 7, -1):
        text = _joined(names, [shortened(value, most) for value in values])
        if cell_len(text) <= room:
            return text
    return _joined(names, [shortened(value, 8) for value in values])


def _joined(names: Sequence[str], values: Sequence[str]) -> str:
    text = "".join(values[:1])
    for place, (name, value) in enumerate(zip(names[1:], values[1:], strict=True)):
        text += f" ({name}: {value})" if place else f" \u27f6 {value}"
    return text


def shortened(text: str, most: int) -> str:
    """At most so many columns, with an ellipsis where something is left out."""
    return text if cell_len(text) <= most else set_cell_size(text, most - 1).rstrip() + "\u2026"
