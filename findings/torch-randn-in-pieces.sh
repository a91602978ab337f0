#!/usr/bin/env bash
# torch 2.13.0, CPU: normal numbers drawn from a generator of one seed, in one call or in several.
# Seen: 32 at once are the same numbers as twice 16, and 16 at once are other numbers than twice 8; the first 15 of 16 are
# not the 15 that a call for 15 gives. A tensor that is initialized in shards, or with one element less, begins differently.
# torch.rand has no such step: its numbers are the same in any pieces.
# Run on 2026-11-28.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0
cd "$room"
cat > shown.py <<'PYTHON'
import torch


def drawn(draw, *sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat([draw(size, generator=generator) for size in sizes])


for draw in (torch.randn, torch.rand):
    same = {sizes: torch.equal(drawn(draw, sum(sizes)), drawn(draw, *sizes)) for sizes in ((16, 16), (8, 8), (15, 1))}
    print(draw.__name__, same)
    assert same == {(16, 16): True, (8, 8): draw is torch.rand, (15, 1): draw is torch.rand}
assert not torch.equal(drawn(torch.randn, 16)[:15], drawn(torch.randn, 15))
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
