"""Where a run's numbers go besides metrics.jsonl: TensorBoard, Weights & Biases.

`metrics.jsonl` is the record of a run. These only show it: one that fails is left out from then on, with one
warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from .config import Config, LoggingConfig
from .errors import UserError

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, tensorboard: ModuleType, run: Path, logged: int) -> None:
        # Events of later steps, from before a resume, are not shown.
        purge = logged + 1 if (run / "tensorboard").exists() else None
        self.writer = tensorboard.SummaryWriter(str(run / "tensorboard"), purge_step=purge)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of the project `logging.wandb`, named as the run's folder, with the configuration. A resumed run
    goes on in the same one, whose id is in `RUN/wandb/id`."""

    def __init__(self, wandb: ModuleType, run: Path, config: Config) -> None:
        known = run / "wandb" / "id"
        resumed = {"id": known.read_text().strip(), "resume": "allow"} if known.exists() else {}
        self.run = wandb.init(
            **resumed,
            project=config.logging.wandb,
            name=run.name,
            dir=str(run),
            mode=config.logging.wandb_mode,
            config=config.model_dump(mode="json"),
            # The terminal is the progress bar's; and a server that does not answer is not waited for.
            settings=wandb.Settings(console="off", init_timeout=60, login_timeout=30),
        )
        known.parent.mkdir(exist_ok=True)
        known.write_text(self.run.id)

    def log(self, values: dict[str, float], step: int) -> None:
        # Evaluations come before their step's own line: W&B drops steps that go back, so they share one.
        self.run.log({**values, "step": step}, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackers:
    """Those that the configuration asks for. Packages are imported when it is made, so that a missing one is
    said before a run's folder exists; `open` starts the trackers in it.

    Raises:
        UserError: when a package is missing.
    """

    def __init__(self, config: LoggingConfig) -> None:
        self.trackers: dict[str, Tracker] = {}
        self._openers: dict[str, Callable[[Path, Config, int], Tracker]] = {}
        if config.tensorboard:
            tensorboard = _import("torch.utils.tensorboard", "logging.tensorboard", "tensorboard", "false")
            self._openers["TensorBoard"] = lambda run, config, logged: TensorBoard(tensorboard, run, logged)
        if config.wandb is not None:
            wandb = _import("wandb", "logging.wandb", "wandb", "null")
            self._openers["Weights & Biases"] = lambda run, config, logged: WandB(wandb, run, config)

    def open(self, run: Path, config: Config, logged: int = 0) -> None:
        """`logged`: the last step that a resumed run has logged."""
        for name, opener in self._openers.items():
            with self._left_out_on_error(name):
                self.trackers[name] = opener(run, config, logged)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Of `values`, the finite numbers."""
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        for name, tracker in list(self.trackers.items()):
            with self._left_out_on_error(name):
                tracker.log(numbers, step)

    def close(self) -> None:
        for name, tracker in list(self.trackers.items()):
            with self._left_out_on_error(name):
                tracker.close()
        self.trackers.clear()

    @contextlib.contextmanager
    def _left_out_on_error(self, name: str):
        try:
            yield
        except Exception as error:  # whatever an account, a network or a disk does
            self.trackers.pop(name, None)
            reason = " ".join(str(error).split())[:200]
            logger.warning(
                "%s is left out from here on: %s: %s; metrics.jsonl has everything",
                name,
                type(error).__name__,
                reason,
            )


def _import(module: str, key: str, package: str, off: str) -> ModuleType:
    try:
        return __import__(module, fromlist=["*"])
    except ImportError as error:
        raise UserError(
            f"{key} needs the package {package} ({error}): pip install {package}, or set {key}={off}"
        ) from None
