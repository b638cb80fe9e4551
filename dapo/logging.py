"""What a run leaves behind: metrics.jsonl, rollouts, evaluations, and what trackers make of them."""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from .config import Config, save_config
from .errors import UserError
from .evaluate import EvalResponse, EvalResult
from .files import replacing
from .resume import cut_back
from .sampling import RolloutBatch
from .trackers import Trackers


class RunLogger:
    """Writes a run's folder. Every file appears whole, and every line of metrics.jsonl in one write.

    Args:
        resumed: steps whose rollouts, and whose lines, the run goes on after. None: a new run.

    Raises:
        UserError: the folder holds another run, cannot be written, or another process writes it.
    """

    def __init__(self, config: Config, resumed: tuple[int, int] | None = None) -> None:
        self.run, self.config = Path(config.run_dir), config
        self.trackers = Trackers(config.logging)
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if resumed is None and not _is_unused(self.run):
                raise UserError(
                    f"run_dir {self.run} is not empty: choose another run_dir, move that run away, or go on "
                    f"with it by dapo train --resume {self.run}"
                )
            self.events = (self.run / "events.jsonl").open("a", encoding="utf-8")
            _claim(self.events)
            if resumed is not None:
                cut_back(self.run, *resumed)
            with replacing(self.run / "config.yaml") as partial:
                save_config(config, partial)
            self.metrics = (self.run / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"run_dir {self.run} cannot be written: {error.strerror}") from None
        self.trackers.open(self.run, config, resumed[1] if resumed else 0)

    def log_rollouts(self, batch: RolloutBatch) -> None:
        if self.config.logging.rollouts:
            _write_jsonl(self.run / "rollouts" / f"step_{batch.step:06d}.jsonl", _rollout_rows(batch))

    def log_step(self, metrics: dict[str, float]) -> None:
        line = {name: _finite(value) for name, value in metrics.items()}
        self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self.metrics.flush()
        self.trackers.log(metrics, metrics["step"])

    def log_event(self, kind: str, step: int, message: str) -> None:
        """What befell the run, for `dapo status`: a line of events.jsonl."""
        event = {"time": time.time(), "kind": kind, "step": step, "message": message}
        self.events.write(json.dumps(event, ensure_ascii=False) + "\n")
        self.events.flush()

    def log_eval(self, result: EvalResult, responses: list[EvalResponse]) -> None:
        path = self.run / "eval" / f"step_{result.step:06d}.jsonl"
        _write_jsonl(path, map(asdict, responses))
        figures = asdict(result)
        _write_text(path.with_suffix(".json"), json.dumps(figures, indent=2) + "\n")
        self.trackers.log({f"eval/{name}": value for name, value in figures.items()}, result.step)

    def evaluations(self) -> list[EvalResult]:
        """All of the run so far, in the order of their steps."""
        paths = sorted((self.run / "eval").glob("step_*.json"))
        return [EvalResult(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]

    def close(self) -> None:
        self.metrics.close()
        self.events.close()
        self.trackers.close()


def _is_unused(run: Path) -> bool:
    """Also where a process was killed before it had a run's folder set up."""
    return all(path.name == "events.jsonl" or path.name.startswith(".") for path in run.iterdir())


def _claim(file: TextIO) -> None:
    """Keeps others from writing the same run, until this process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{file.name} is being written by another process: that run is still going") from None
    except OSError:
        pass  # a file system without locks


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
