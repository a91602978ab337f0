#!/usr/bin/env bash
# torchdata 0.11.0: StatefulDataLoader, shuffled by a generator that the user gives it, without workers. Its state goes on
# with the right rows of the epoch in which it was taken, and then shuffles otherwise than the uninterrupted run; a state that
# was taken after an epoch is followed by another order at once. With two workers, or with no generator, the epochs are those
# of the uninterrupted run.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(workers: int, own: bool) -> StatefulDataLoader:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0) if own else None
    return StatefulDataLoader(range(10), batch_size=3, shuffle=True, num_workers=workers, generator=generator)


def epoch(batches: StatefulDataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


if __name__ == "__main__":
    for workers, own in ((0, True), (2, True), (0, False), (2, False)):
        whole, states = loader(workers, own), {}
        first = []
        for batch in whole:
            first.append(batch.tolist())
            if len(first) == 2:
                states["in the first epoch"] = whole.state_dict()
        states["after it"] = whole.state_dict()
        second = epoch(whole)
        for place, state in states.items():
            again = loader(workers, own)
            again.load_state_dict(state)
            rest_is_right = place == "after it" or epoch(again) == first[2:]
            second_is_right = epoch(again) == second
            print(f"workers {workers}, own generator {own}, saved {place}: second epoch as uninterrupted {second_is_right}")
            assert rest_is_right and second_is_right == (workers > 0 or not own)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
