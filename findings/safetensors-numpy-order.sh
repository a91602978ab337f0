#!/usr/bin/env bash
# safetensors 0.8.0: `safetensors.numpy.save` and `save_file` write an array in Fortran order as it lies in memory, under its own
# shape: loaded, it holds the right numbers at other places. So does a transposed array, as on the way from a layer of
# Keras or JAX to one of torch, or out of scikit-learn's PCA. The same arrays in C order are right, and 0.7.0 wrote all right. `safetensors.torch` refuses a transposed tensor with an error.
# Documentation: "Tensors need to be contiguous and dense", which arrays in Fortran order are.
# Reported in https://github.com/safetensors/safetensors/issues/825.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cd "$room"
cat > shown.py <<'PYTHON'
import importlib.metadata

import numpy as np
from safetensors.numpy import load, save

version = importlib.metadata.version("safetensors")
weights = np.arange(6, dtype=np.float32).reshape(2, 3)
cases = {"C order": weights, "Fortran order": np.asfortranarray(weights), "transposed": weights.T}
for name, array in cases.items():
    assert array.flags["C_CONTIGUOUS"] or array.flags["F_CONTIGUOUS"]
    loaded = load(save({"weight": array}))["weight"]
    equal = bool(np.array_equal(loaded, array))
    print(f"safetensors {version}, {name}: loaded as saved {equal}", "" if equal else f"{array[0].round(2)} became {loaded[0].round(2)}")
    assert loaded.shape == array.shape
    assert np.allclose(np.sort(loaded, axis=None), np.sort(array, axis=None))
    assert equal == (name == "C order" or version != "0.8.0")
PYTHON
for version in 0.8.0 0.7.0; do
    python3 -m venv "$room/environment-$version"
    "$room/environment-$version/bin/python" -m pip install -q "safetensors==$version" numpy==2.4.6
    "$room/environment-$version/bin/python" shown.py
done
