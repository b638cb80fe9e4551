"""Mode `reasoning_gym`: that library's own scorers. Right is exactly 1.0: they give partial credit to answers
that merely contain the right one."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any


def judge(response: str, answer: str, row: dict[str, Any] | None) -> bool:
    """Judges by the task that made `row`: an entry of reasoning_gym, which names it, or `{task, options,
    entry}`. Without either, right is equal."""
    if row is None:
        return response == answer.strip()
    if "task" in row and "entry" in row:
        dataset, entry = _dataset(row["task"], json.dumps(row["options"], sort_keys=True)), row["entry"]
    else:
        name = (row.get("metadata") or {}).get("source_dataset")
        if name is None:
            return response == answer.strip()
        dataset, entry = _dataset(name, "{}"), row
    return dataset.score_answer(response, entry) == 1.0


def warm_up() -> None:
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=64)
def _dataset(name: str, options: str):
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **{"seed": 0, **json.loads(options)})
