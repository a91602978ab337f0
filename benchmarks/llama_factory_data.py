"""What LLaMA-Factory takes to prepare texts, as `data_scale.py prepare --task language_modeling` has lockstep do it:
Parquet to blocks of tokens, the same texts, the same tokenizer.

In: a folder of texts and one with a tokenizer (`data_scale.py` has made both). Out: a JSON line, with processor time
and memory. Runs in a virtual environment of LLaMA-Factory's own, which also has pytest:
  python benchmarks/llama_factory_data.py --texts FOLDER --tokenizer FOLDER --rows 100000 --cores 2
Two libraries that it imports for pictures and sounds are left out: as installed there they did not go with torch's
build for CPUs. Texts need neither.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

from data_scale import GPT2, measured, texts  # noqa: E402
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # type: ignore[import-not-found]  # noqa: E402
from llamafactory.hparams import get_train_args  # type: ignore[import-not-found]  # noqa: E402
from llamafactory.model import load_tokenizer  # type: ignore[import-not-found]  # noqa: E402


def prepared(folder: Path, file: Path, cores: int) -> Any:
    """Load LLaMA-Factory's dataset and preprocess it."""
    told = {"texts": {"file_name": str(file), "columns": {"prompt": "text"}}}
    (folder / "dataset_info.json").write_text(json.dumps(told))
    asked: dict[str, Any] = {"stage": "pt", "do_train": True, "model_name_or_path": str(folder / "model")}
    asked |= {"dataset": "texts", "dataset_dir": str(folder), "template": "empty", "cutoff_len": 128, "packing": True}
    asked |= {"preprocessing_num_workers": cores, "output_dir": str(folder / "out"), "report_to": "none"}
    asked |= {"finetuning_type": "full", "use_cpu": True}
    model, data, training, _, _ = get_train_args(asked)
    tokenizer = load_tokenizer(model)["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data)
    return get_dataset(template, model, data, training, stage="pt", tokenizer=tokenizer)["train_dataset"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--cores", type=int, default=1)
    given = parser.parse_args()
    file = texts(Path(given.texts) / f"{given.rows}.parquet", given.rows)
    small = texts(Path(given.texts) / "validation.parquet", 1000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        for each in Path(given.tokenizer).iterdir():
            (folder / "model" / each.name).write_bytes(each.read_bytes())
        (folder / "model/config.json").write_text(json.dumps({"model_type": "gpt2", **GPT2["config"]}))
        prepared(folder, small, 1)  # imports
        blocks: list[Any] = []
        found = measured(lambda: blocks.append(prepared(folder, file, given.cores)), given.rows, given.cores)
        told = {"blocks": len(blocks[0]), "tokens_a_block": len(blocks[0][0]["input_ids"])}
        print(json.dumps({"rows": given.rows, "cores": given.cores} | told | found))


if __name__ == "__main__":
    main()
