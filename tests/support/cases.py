"""Check that no test case is lost when tests move: two lists of collected cases, joined by file name and case.

In: `python -m support.cases BEFORE AFTER [TABLE]`: outputs of `pytest --collect-only -q`, and a table `file::case ->
file::case` of renamed cases. Out: counts; status 1 and the names of missing or duplicate cases.
"""

import sys
from collections import Counter
from pathlib import Path


def cases(listing: str) -> Counter[str]:
    """Cases without their files' folders: `test_x.py::test_y[z]` -> count."""
    return Counter(line.partition("::")[0].rpartition("/")[2] + "::" + line.partition("::")[2]
                   for line in listing.splitlines() if line.startswith("tests/") and "::" in line)  # fmt: skip


def main(before: str, after: str, table: str = "") -> int:
    rows = [row.split(" -> ") for row in Path(table).read_text().splitlines()] if table else []
    names = dict(rows)
    was, now = cases(Path(before).read_text()), cases(Path(after).read_text())
    want = Counter({names.get(name, name): count for name, count in was.items()})
    print(f"{was.total()} cases before, {now.total()} after, {len(rows)} renamed, {len(now - want)} new")
    for name in sorted((want - now).elements()):
        print("missing:", name)
    return int(bool(want - now))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
