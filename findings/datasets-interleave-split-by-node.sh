#!/usr/bin/env bash
# datasets 5.2.0: two streams that are interleaved in turn and then split between two nodes by split_dataset_by_node.
# Seen: where the number of shards is no multiple of the nodes, each node keeps every second example, so one node gets
# all of the first source and none of the second, and the other node the reverse; they also get 8 and 7 examples. With a
# multiple of the nodes (4 and 4 shards) both see both sources.
# Run on 2026-11-28.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node


def sources(shards_of_second: int) -> list[list[str]]:
    first = Dataset.from_dict({"from": ["first"] * 8}).to_iterable_dataset(num_shards=4)
    second = Dataset.from_dict({"from": ["second"] * 8}).to_iterable_dataset(num_shards=shards_of_second)
    mixed = interleave_datasets([first, second])
    return [[row["from"] for row in split_dataset_by_node(mixed, rank=rank, world_size=2)] for rank in range(2)]


for shards in (3, 4):
    seen = sources(shards)
    print(f"second source in {shards} shards:", [(len(rank), sorted(set(rank))) for rank in seen])
odd, even = sources(3), sources(4)
assert [set(rank) for rank in odd] == [{"first"}, {"second"}]
assert len(odd[0]) != len(odd[1])
assert [set(rank) for rank in even] == [{"first", "second"}] * 2
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
