"""What a run leaves behind: metrics.jsonl, rollouts, evaluations, and what trackers make of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from .config import Config, save_config
from .errors import UserError
from .evaluate import EvalResponse, EvalResult
from .files import replacing
from .sampling import RolloutBatch
from .trackers import Trackers


class RunLogger:
    """Writes a run's folder. Every file appears whole, and every line of metrics.jsonl in one write."""

    def __init__(self, config: Config) -> None:
        self.run, self.config = Path(config.run_dir), config
        self.trackers = Trackers(config.logging)
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if any(self.run.iterdir()):
                raise UserError(
                    f"run_dir {self.run} is not empty: choose another run_dir, or move that run away"
                )
            save_config(config, self.run / "config.yaml")
            self.metrics = (self.run / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"run_dir {self.run} cannot be made: {error.strerror}; choose another") from None
        self.trackers.open(self.run, config)

    def log_step(self, metrics: dict[str, float], batch: RolloutBatch) -> None:
        if self.config.logging.rollouts:
            _write_jsonl(self.run / "rollouts" / f"step_{batch.step:06d}.jsonl", _rollout_rows(batch))
        line = {name: _finite(value) for name, value in metrics.items()}
        self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self.metrics.flush()
        self.trackers.log(metrics, batch.step)

    def log_eval(self, result: EvalResult, responses: list[EvalResponse]) -> None:
        path = self.run / "eval" / f"step_{result.step:06d}.jsonl"
        _write_jsonl(path, map(asdict, responses))
        figures = asdict(result)
        _write_text(path.with_suffix(".json"), json.dumps(figures, indent=2) + "\n")
        self.trackers.log({f"eval/{name}": value for name, value in figures.items()}, result.step)

    def close(self) -> None:
        self.metrics.close()
        self.trackers.close()


def _rollout_rows(batch: RolloutBatch) -> Iterable[dict]:
    for group, kept in zip(batch.sampled, batch.qualified):
        for sample in group.samples:
            yield {
                "prompt": group.prompt.text,
                "response": sample.text,
                "answer": group.prompt.row.answer,
                "reward": sample.reward,
                "accuracy": int(sample.verdict.correct),
                "length": len(sample.completion.token_ids),
                "truncated": not sample.completion.finished,
                "kept": kept,
                "overlong_penalty": sample.penalty,
                "reward_terms": sample.verdict.terms,
                "failure": sample.verdict.failure,
            }


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    _write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        # A lone surrogate becomes its JSON escape.
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))
