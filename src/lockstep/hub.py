"""Export folder -> model card -> push to the Hub.

In: full weights on rank 0 and final scores. Out: `OUTPUT/export/`, which `from_pretrained` loads; written aside,
then renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml
from torch import Tensor

from lockstep import __version__
from lockstep.run import Run, RunError
from lockstep.tasks.task import Task


def write_export(
    run: Run, task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]], steps: int
) -> Path:
    """Write the export and its model card. Rank 0 only."""
    final = run.folder / "export"
    aside = run.folder / ".export.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    task.write(aside, weights)
    (aside / "README.md").write_text(model_card(run, task, scores, steps), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.rename(aside, final)
    return final


def model_card(run: Run, task: Task, scores: dict[str, dict[str, float]], steps: int) -> str:
    """The Hub's README.md: metadata it indexes, then data, metrics and the run file for a reader."""
    source = str(task.prepared.facts["source"])
    metadata: dict = {
        "library_name": "transformers",
        "tags": ["lockstep", task.pipeline],
        "pipeline_tag": task.pipeline,
        "model-index": [
            {
                "name": run.name,
                "results": [
                    {
                        "task": {"type": task.pipeline},
                        "dataset": {"name": source, "type": source, "split": split},
                        "metrics": [{"type": n, "value": round(v, 6)} for n, v in values.items() if n != "examples"],
                    }
                    for split, values in scores.items()
                ],
            }
        ],
    }
    if run.model.source is not None and "/" in run.model.source and not Path(run.model.source).expanduser().exists():
        metadata["base_model"] = run.model.source
    names = [n for n in next(iter(scores.values())) if n != "examples"]
    table = ["| split | examples | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for split, values in scores.items():
        cells = " | ".join(f"{values[n]:.4f}" for n in names)
        table.append(f"| {split} | {values['examples']:.0f} | {cells} |")
    labels = ", ".join(task.prepared.facts.get("labels", []))
    labels = f" Labels: {labels}." if labels else ""
    origin = f"fine-tuned from `{run.model.source}`" if run.model.source else f"a {run.model.type} trained from scratch"
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {run.name}\n\n"
        f"{origin[0].upper()}{origin[1:]} on `{source}` for {steps} steps of {run.batch_size} examples in "
        f"{run.precision}.{labels}\n\n"
        f"## Use\n\n```python\n{task.usage}\n```\n\n"
        f"## Metrics\n\n{chr(10).join(table)}\n\n"
        f"## Training\n\nTrained with lockstep {__version__}. The same bits come out at any number of processes when "
        f"`strategy.exact` is true. The run file, complete:\n\n```yaml\n{run.dump()}```\n"
    )


def publish(folder: Path, repository: str, private: bool) -> str:
    """Upload an export; the token comes from the environment or the Hub's own login. Returns the address. Errors:
    `RunError`."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise RunError(f"hub.push_to: no token to push to {repository} with; set HF_TOKEN. The export is in {folder}")
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with lockstep")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise RunError(
            f"hub.push_to: pushing {folder} to {repository} failed: {' '.join(str(error).split())}"
        ) from error
    return str(commit.repo_url if hasattr(commit, "repo_url") else commit)
