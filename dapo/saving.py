"""When a run's state is saved, which checkpoints are kept, and what resuming takes from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpoint import BackgroundWriter, Checkpoint, CheckpointFailed, latest_checkpoint, prune, set_aside
from .config import Config
from .errors import TrainingStopped, UserError
from .model_files import weights_fingerprint
from .parallel import World, model_folder, same_on_all_ranks
from .run_state import (
    position_from_json,
    position_to_json,
    random_states,
    set_random_states,
    tensors_to_fill,
    training_tensors,
)
from .sampling import Sampler
from .update import Updater

logger = logging.getLogger(__name__)


class Saver:
    """Saves and restores what updater and sampler hold. Every rank has one, and they call it alike.

    Args:
        on_failure: is told, besides the log, of a checkpoint that could not be written.
    """

    def __init__(
        self,
        config: Config,
        updater: Updater,
        sampler: Sampler,
        world: World,
        on_failure: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.on_failure = on_failure
        self.settings, self.updater, self.sampler, self.world = config.checkpoint, updater, sampler, world
        self.root = Path(config.run_dir) / "checkpoints"
        self.writer = BackgroundWriter(self.root, world)
        self.saved: int | None = None
        """The last step that was saved, or is being saved."""
        self.base = same_on_all_ranks(_fingerprints(config) if world.is_main else {}, world)
        """Of weights that are not trained, by their path."""
        self.set_aside: list[int] = []
        """Damaged checkpoints that `restore` passed over."""
        self.best: dict[str, float] | None = None
        """`step` and `accuracy` of the best evaluation so far."""

    def note_evaluation(self, step: int, accuracy: float) -> bool:
        """Whether it is the best so far, of a step that is kept for it."""
        if not (self.settings.keep_best and step and (self.best is None or accuracy > self.best["accuracy"])):
            return False
        self.best = {"step": step, "accuracy": accuracy}
        return True

    def save(self, step: int, unlogged: dict[str, Any] | None = None) -> None:
        """Saves the state after a step, beside the training unless configured otherwise. A failure is a
        warning: of this save or, where it goes on beside the training, of the one before.

        Args:
            unlogged: the step's metrics, where its line is not in metrics.jsonl yet.
        """
        state = {
            "step": step,
            "updates": self.updater.updates,
            "skipped_in_a_row": self.updater.skipped_in_a_row,
            "best": self.best,
            "base": self.base,
            "unlogged": unlogged,
            **position_to_json(self.sampler.position),
        }
        best = self.best and int(self.best["step"])

        def tidy(written: Path) -> None:
            prune(self.root, self.settings.keep, best)

        self._wait()
        self.saved = step
        self.writer.save(step, training_tensors(self.updater), state, random_states(), tidy)
        if not self.settings.asynchronous:
            self._wait()

    def _wait(self) -> None:
        """Until the save in flight is through."""
        try:
            self.writer.wait()
        except CheckpointFailed as error:
            self.saved = None
            self.on_failure(str(error))
            logger.warning("%s; training goes on, earlier checkpoints are whole", error)

    def finish(self, step: int, unlogged: dict[str, Any] | None = None) -> None:
        """Saves the state after the run's last step, unless that was done, and waits until it is written.

        Raises:
            TrainingStopped: it could not be written.
        """
        try:
            if self.saved != step:
                self.save(step, unlogged)
            self.writer.wait()
        except CheckpointFailed as error:
            raise TrainingStopped(
                f"{error}; step {step} is not saved, earlier checkpoints are whole"
            ) from None

    def restore(self) -> dict[str, Any] | None:
        """Puts the newest whole checkpoint's state back, and returns its plain values; None where there is
        no checkpoint yet."""
        checkpoint = latest_checkpoint(self.root, self.world)
        if checkpoint is None:
            return None
        self._check_base(checkpoint.state)
        self._restore(checkpoint)
        if self.world.is_main:
            self.set_aside = set_aside(self.root, after=checkpoint.step)
        return checkpoint.state

    def _check_base(self, state: dict[str, Any]) -> None:
        saved = state.get("base", self.base)
        if sorted(saved.values()) != sorted(self.base.values()):
            raise UserError(
                f"the weights in {' or '.join(self.base)} are not those that the run began with, and what it "
                "trains builds on them (LoRA, or the reference of algorithm.kl_coef): put those back"
            )

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, ranks = checkpoint.state, checkpoint.rank_states
        checkpoint.load(tensors_to_fill(self.updater, checkpoint.names))
        self.updater.updates = state["updates"]
        self.updater.skipped_in_a_row = state["skipped_in_a_row"]
        self.sampler.position = position_from_json(state, self.sampler.stream.prompts)
        # Sampling noise is keyed by seed, step, prompt and sample: these matter to code of the user's own.
        set_random_states(ranks[min(self.world.rank, len(ranks) - 1)])
        self.best, self.saved = state["best"], state["step"]

    def close(self) -> None:
        self.writer.close()


def _fingerprints(config: Config) -> dict[str, str]:
    """Of the models that training needs besides what a checkpoint holds."""
    paths = [config.model.path] if config.lora.rank is not None else []
    if config.algorithm.kl_coef:
        paths.append(config.model.reference_path or config.model.path)
    return {path: weights_fingerprint(model_folder(path)) for path in dict.fromkeys(paths)}
