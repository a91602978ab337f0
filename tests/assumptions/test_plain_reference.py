"""Assumptions of the plain reference about pyarrow, datasets, tokenizers, torch, transformers and PEFT."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, softplus

from support.assumed import rests_on_it

# -- rows --------------------------------------------------------------------------------------------------------------


@rests_on_it("src/lockstep/plain/rows.py")
def test_string_columns_of_pyarrows_csv_reader(tmp_path: Path) -> None:
    """pyarrow's read_csv with the column type "string" keeps "NA", "", "007" and quoted line breaks unchanged. Other
    columns turn "" into None and infer their type. A byte order mark is removed. With column_names, the first line is a
    row."""
    from pyarrow import csv

    file = tmp_path / "a.csv"
    file.write_text('text,number\nNA,1\n"",2\n007,\n"a\nb, c",4\n', encoding="utf-8-sig")
    parse, texts = csv.ParseOptions(newlines_in_values=True), csv.ConvertOptions(column_types={"text": "string"})
    rows = csv.read_csv(file, parse_options=parse, convert_options=texts).to_pylist()
    assert [row["text"] for row in rows] == ["NA", "", "007", "a\nb, c"]
    assert [row["number"] for row in rows] == [1, 2, None, 4]
    named = csv.read_csv(file, csv.ReadOptions(column_names=["a", "b"]), parse).to_pylist()
    assert (named[0], len(named)) == ({"a": "text", "b": "number"}, 5)


@rests_on_it("src/lockstep/plain/rows.py")
def test_parquet_rows_become_python_values_in_order(tmp_path: Path) -> None:
    """parquet.read_table(...).to_pylist() returns rows in order across row groups, with nested lists and mappings, None
    for null, and bytes unchanged."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"a": n, "b": [{"c": "x" * n}], "d": None if n else b"\0\xff"} for n in range(5)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == rows


@rests_on_it("src/lockstep/plain/rows.py", "src/lockstep/data/hub.py", "src/lockstep/data/hub_rows.py")
def test_files_and_types_of_a_dataset_builder(tmp_path: Path) -> None:
    """load_dataset names the builder of files ("json", "csv") in info.builder_name. load_dataset_builder has the files
    of each split in config.data_files, config.sep for tables, and info.features None unless the card declares types."""
    import datasets

    (tmp_path / "train.csv").write_text("a;b\n1;x\n")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  sep: ';'\n  data_files: train.csv\n---\n"
    )
    builder: Any = datasets.load_dataset_builder(str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert (builder.info.features, builder.config.sep) == (None, ";")
    files = {str(split): [str(file) for file in files] for split, files in builder.config.data_files.items()}
    assert {split: [Path(file).name for file in some] for split, some in files.items()} == {"train": ["train.csv"]}
    table = datasets.load_dataset("csv", data_files=files, sep=";", cache_dir=str(tmp_path / "cache"))
    assert table["train"].info.builder_name == "csv"
    assert list(table["train"]) == [{"a": 1, "b": "x"}]


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5, "c": 6}
    tool = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tool.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tool.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=special
    )
    return PreTrainedTokenizerFast(tokenizer_object=tool, pad_token="[PAD]", sep_token="[SEP]", cls_token="[CLS]")


@rests_on_it("src/lockstep/plain/examples.py", "src/lockstep/data/qa_features.py")
def test_parts_of_an_encoding_are_numbered(tokenizer: Any) -> None:
    """sequence_ids is None for special tokens, 0 for the first text and 1 for the second. text_target alone is encoded
    into input_ids. add_special_tokens=False omits the template. An empty text has only the template's tokens."""
    assert tokenizer("a b", "c").sequence_ids(0) == [None, 0, 0, None, 1, None]
    assert tokenizer(text_target="a b")["input_ids"] == tokenizer("a b")["input_ids"] == [2, 4, 5, 3]
    assert tokenizer("a b", add_special_tokens=False)["input_ids"] == [4, 5]
    assert [tokenizer("")["input_ids"], tokenizer("", add_special_tokens=False)["input_ids"]] == [[2, 3], []]


@rests_on_it("src/lockstep/plain/examples.py")
def test_offsets_and_assistant_masks_of_a_chat_template(tokenizer: Any) -> None:
    """apply_chat_template with return_dict passes tokenizer_kwargs to the tokenizer, so offset_mapping counts
    characters of the text that tokenize=False returns. assistant_masks is 1 for tokens inside generation blocks. No
    special tokens are added for a template without any."""
    template = (
        "{% for m in messages %}{{ m.role[0] }} {% generation %}{{ m.content }} {% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}c{% endif %}"
    )
    turns = [{"role": "assistant", "content": "b"}]
    how = {"chat_template": template, "return_dict": True}
    offsets = {"tokenizer_kwargs": {"return_offsets_mapping": True}, "return_assistant_tokens_mask": True}
    encoded = tokenizer.apply_chat_template(turns, **how, **offsets)
    assert (encoded["input_ids"], encoded["offset_mapping"]) == ([4, 5], [(0, 1), (2, 3)])
    assert encoded["assistant_masks"] == [0, 1]
    text = [tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=end, **how) for end in (0, 1)]
    assert text == ["a b ", "a b c"]


@rests_on_it(
    "src/lockstep/plain/examples.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/models/head_labels.py",
    "src/lockstep/tasks/models/model_configs.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/models/source_files.py",
    "src/lockstep/tasks/token_classification.py",
)
def test_labels_of_a_config(tmp_path: Path) -> None:
    """AutoConfig reads id2label's keys as integers. num_labels replaces the names by LABEL_0, LABEL_1, ... unless their
    number is equal. `architectures` names the saved class."""
    from transformers import AutoConfig

    names = {str(number): f"name {number}" for number in range(11)}
    entries = {"model_type": "bert", "id2label": names, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config: Any = AutoConfig.from_pretrained(tmp_path)
    assert [name for _, name in sorted(config.id2label.items())] == [*names.values()]
    assert config.architectures == ["BertForSequenceClassification"]
    config.num_labels = 11
    assert config.id2label[10] == "name 10"
    config.num_labels = 2
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


# -- the user's module -------------------------------------------------------------------------------------------------


@rests_on_it("src/lockstep/plain/module.py", "src/lockstep/tasks/modules/dataset.py")
def test_torch_format_of_a_data_set() -> None:
    """format["type"] of a data set of datasets is None by default. with_format("torch") returns tensors, int64 for
    integers and float32 for floats, by index and through Subset."""
    import datasets
    from torch.utils.data import Subset

    rows = datasets.Dataset.from_dict({"n": [1, 2, 3], "x": [0.5, 1.5, 2.5]})
    assert rows.format["type"] is None
    item: Any = Subset(rows.with_format("torch"), [2, 0])[0]
    assert (item["n"].item(), item["n"].dtype, item["x"].item(), item["x"].dtype) == (3, torch.int64, 2.5, torch.float)


@rests_on_it("src/lockstep/plain/rows.py", "src/lockstep/data/splitting.py")
def test_a_seed_of_two_numbers_is_another_stream() -> None:
    """default_rng([7, 1]) draws other numbers than default_rng(7), and repeats them. round() rounds halves to the even
    number."""
    draws = [np.random.default_rng(seed).permutation(50).tolist() for seed in (7, [7, 1], [7, 1])]
    assert draws[0] != draws[1] == draws[2]
    assert [round(0.5), round(1.5), round(2.5)] == [0, 2, 2]


# -- losses ------------------------------------------------------------------------------------------------------------


@rests_on_it("src/lockstep/plain/losses.py", "src/lockstep/tasks/classification.py")
def test_weights_and_smoothing_of_torchs_losses() -> None:
    """cross_entropy with weights and smoothing e, unreduced, is (1 - e) * w[label] * -logp[label] + e / C * the sum of
    w[c] * -logp[c] over all classes c. pos_weight of binary_cross_entropy_with_logits multiplies only the positive
    term."""
    logits, label, weight = torch.tensor([[0.5, -1.0, 2.0]]), torch.tensor([1]), torch.tensor([1.0, 3.0, 0.5])
    logs = -logits.log_softmax(1)[0] * weight
    loss = cross_entropy(logits, label, weight, reduction="none", label_smoothing=0.1)
    assert loss.tolist() == pytest.approx([0.9 * logs[1].item() + 0.1 / 3 * logs.sum().item()])
    target = torch.tensor([[0.8, 0.0, 1.0]])
    loss = binary_cross_entropy_with_logits(logits, target, reduction="none", pos_weight=weight)
    shares = -weight * target * logsigmoid(logits) + (1 - target) * softplus(logits)
    assert loss[0].tolist() == pytest.approx(shares[0].tolist())


@rests_on_it("src/lockstep/plain/losses.py")
def test_rows_are_stacked_and_padded_on_the_right() -> None:
    """pad_sequence with batch_first returns [B, T] in the order of its list, padded on the right."""
    rows = nn.utils.rnn.pad_sequence([torch.tensor([1]), torch.tensor([2, 3, 4])], True, -100)
    assert rows.tolist() == [[1, -100, -100], [2, 3, 4]]


# -- training ----------------------------------------------------------------------------------------------------------


@rests_on_it("src/lockstep/plain/train.py", "src/lockstep/config/schedules.py")
def test_curves_of_transformers_schedules() -> None:
    """get_scheduler: polynomial falls from the rate to lr_end as (1 - progress) ** power; cosine_with_min_lr falls to
    min_lr_rate times the rate; warmup_stable_decay is constant until its last num_decay_steps; inverse_sqrt falls as
    the root of warmup / step. During warmup, each has the factor step / warmup."""
    from transformers import get_scheduler

    def rates(name: str, total: int | None, **own: Any) -> list[float]:
        optimizer, rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0), list[float]()
        schedule: Any = get_scheduler(name, optimizer, 2, total, own)
        for _ in range(10):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        assert rates[:3] == [0.0, 1.0, 2.0]
        return rates

    left = [1 - step / 8 for step in range(8)]
    assert rates("polynomial", 10, lr_end=0.5, power=2.0)[2:] == pytest.approx([0.5 + 1.5 * s**2 for s in left])
    cosine = [0.25 + 0.75 * (1 + math.cos(math.pi * (1 - s))) / 2 for s in left]
    assert rates("cosine_with_min_lr", 10, min_lr_rate=0.25)[2:] == pytest.approx([2 * factor for factor in cosine])
    decays = {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.0}
    assert rates("warmup_stable_decay", 10, **decays)[2:] == pytest.approx([2.0] * 5 + [1.5, 1.0, 0.5])
    assert rates("inverse_sqrt", None)[2:] == pytest.approx([2 * (2 / step) ** 0.5 for step in range(2, 10)])


@rests_on_it("src/lockstep/plain/train.py", "src/lockstep/strategies/optimizers/muon.py")
def test_muon_scales_its_step_by_the_shape() -> None:
    """torch.optim.Muon decays by 1 - lr * decay, and moves a matrix by lr times its orthogonalized momentum, times
    sqrt(max(1, rows / columns)) with "original" and 0.2 * sqrt(max(rows, columns)) with "match_rms_adamw"."""
    norms = []
    for scaling in ("original", "match_rms_adamw"):
        weight = nn.Parameter(torch.zeros(8, 2))
        weight.grad = torch.eye(8)[:, :2].clone()
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.5, adjust_lr_fn=scaling).step()
        norms.append(weight.detach().norm().item())
    assert norms[1] / norms[0] == pytest.approx(0.2 * 8**0.5 / 4**0.5, rel=1e-2)


@rests_on_it(
    "src/lockstep/plain/train.py",
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/lab/init/questions.py",
    "src/lockstep/tasks/models/model_configs.py",
)
def test_defaults_of_nested_configs() -> None:
    """CONFIG_MAPPING has each family's class by its type. sub_configs_defaults has, as init_kwargs, the entries that a
    nested config receives (is_decoder of a decoder). MODEL_FOR_MASKED_LM_MAPPING_NAMES lists BERT and not Llama."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    within: Any = CONFIG_MAPPING["encoder-decoder"].sub_configs_defaults
    cross = {"is_decoder": True, "add_cross_attention": True}
    assert {name: dict(of.init_kwargs or {}) for name, of in within.items()} == {"encoder": {}, "decoder": cross}
    assert CONFIG_MAPPING["bert"].sub_configs_defaults == {}
    assert ("bert" in MASKED, "llama" in MASKED) == (True, False)


@rests_on_it("src/lockstep/plain/train.py", "src/lockstep/tasks/models/adapters.py")
def test_excluded_modules_match_whole_names() -> None:
    """get_peft_config chooses the class by peft_type. all-linear with exclude_modules leaves out each module whose
    whole name matches the pattern. modules_to_save are trained in full."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(OrderedDict(body=nn.Linear(2, 2), classifier=nn.Sequential(nn.Linear(2, 2))))
    options = {"peft_type": "LORA", "r": 1, "target_modules": "all-linear", "modules_to_save": ["classifier"]}
    config = peft.get_peft_config(options | {"task_type": None, "exclude_modules": r".*(classifier)(\..*)?"})
    adapted = peft.PeftModel(model, config)
    assert isinstance(config, peft.LoraConfig)
    trained = {name.replace("base_model.model.", "") for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora" in name} == {f"body.lora_{s}.default.weight" for s in "AB"}
    assert "classifier.modules_to_save.default.0.weight" in trained
