"""Algorithm 1 of the paper: sample a batch, judge it, filter it, update on it, again."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import torch
from rich.console import Console

from .checkpoint.together import on_main
from .config import Config
from .data import PromptStream
from .errors import UserError, first_line
from .evaluate import evaluate
from .logging import RunLogger
from .lora import save_adapter
from .memory_advice import generation_advice
from .metrics import peak_memory_bytes, peak_memory_gb, rollout_metrics
from .model_facts import max_positions
from .model_files import save_model
from .parallel import (
    Watchdog,
    all_reduce_max,
    full_state_dict,
    open_world,
    phase,
)
from .parallel.weights import adapter_state_dict
from .policy_setup import build_policy
from .progress import StepProgress, describe_eval, describe_gain
from .report import write_report
from .resume import check_can_begin_again, is_finished
from .rollout.build import build_engine, engine_world
from .sampling import RolloutBatch, Sampler
from .saving import Saver
from .stopping import Abandoned, StopRequest
from .train_data import load_train_data
from .update import Updater


class Trainer:
    """One run, from its configuration to its report. Raises `UserError` before anything is written when the
    configuration, the model or the data cannot work.

    Args:
        changes: None for a new run. To go on with `config.run_dir`: what of its configuration differs.
    """

    def __init__(
        self, config: Config, console: Console | None = None, changes: list[str] | None = None
    ) -> None:
        self.config = config
        self.stop = StopRequest()
        self.world = open_world(config.parallel)
        self.watchdog = Watchdog(self.world, config.parallel)
        # One process speaks and writes for all.
        self.console = (console or Console()) if self.world.is_main else Console(quiet=True)
        torch.manual_seed(config.seed)
        built = build_policy(config, self.world)
        self.policy, self.tokenizer = built.policy, built.tokenizer
        positions = max_positions(self.policy.model)
        self.data, self.held_out = load_train_data(config, self.tokenizer, positions, self.console)
        self.stream = PromptStream(self.data.prompts, config.seed)
        longest = max(judged.longest for judged in (self.data, self.held_out) if judged is not None)
        self.engine = build_engine(config, built, self.world, longest)
        self.generating = engine_world(config, self.world)
        judging = (self.engine, self.data.scorer, self.tokenizer, self.generating, self.stop.abandon)
        self.sampler = Sampler(config, self.stream, *judging)
        self.updater = Updater(config, self.policy, self.world)
        failed = functools.partial(self.note, "checkpoint failed")
        self.saver = Saver(config, self.updater, self.sampler, self.world, failed)
        self.step = 0
        """The last step whose updates are made."""
        self.unlogged: dict[str, float] | None = None
        """That step's metrics, while its line is not in metrics.jsonl."""
        self.logger = self._open_logger(None if changes is None else self._restore())
        for change in changes or ():
            self.console.print(f"changed on resume: {change}", soft_wrap=True)
            self.note("changed", change)

    def _restore(self) -> tuple[int, int]:
        """Takes up the newest whole checkpoint, or begins anew where there is none; returns the last steps
        whose rollouts, and whose lines, are of the state that the run goes on from."""
        state = self.saver.restore()
        if state is None:
            every = self.config.checkpoint.every
            on_main(lambda: check_can_begin_again(Path(self.config.run_dir), every), self.world)
            self.console.print("there is no checkpoint yet: the run begins again", soft_wrap=True)
            return 0, 0
        self.step, self.unlogged = state["step"], state["unlogged"]
        self._check_unfinished()
        self.console.print(f"going on after step {self.step}", soft_wrap=True)
        self.engine.sync_weights()
        return self.step, self.step - (self.unlogged is not None)

    def _check_unfinished(self) -> None:
        run, steps = Path(self.config.run_dir), self.config.train.steps
        if self.step > steps or (self.step == steps and self.unlogged is None and is_finished(run, steps)):
            raise UserError(
                f"--resume {run}: the run is through, with {self.step} steps made and train.steps {steps}; "
                f"to go on give more, as in train.steps={2 * self.step}"
            )

    def _open_logger(self, resumed: tuple[int, int] | None) -> RunLogger | None:
        """On rank 0; an error there is one on all ranks."""
        logger = None

        def make() -> None:
            nonlocal logger
            logger = RunLogger(self.config, resumed)

        on_main(make, self.world)
        if logger is not None:
            kind, how = ("started", "") if resumed is None else ("resumed", f"after step {self.step}")
            count = "one process" if self.world.size == 1 else f"{self.world.size} processes"
            logger.log_event(kind, self.step, f"{how} on {count}".strip())
            for step in self.saver.set_aside:
                logger.log_event("damaged checkpoint", step, f"step {step} was passed over")
        return logger

    def train(self) -> None:
        """Goes on to the last step. Stopped by a signal, it raises what the signal stands for, with the last
        finished step saved."""
        try:
            self._train()
        except Exception as error:
            if not self.world.distributed:  # of several processes the command knows better which one failed
                self.note("failed", first_line(error) or type(error).__name__)
            raise

    def _train(self) -> None:
        steps = self.config.train.steps
        progress = StepProgress(self.console, self.step, steps, self.config.rollout.prompts_per_step)
        noted = self.stop.noted(self._say_stopping, after_errors=self.world.distributed)
        with phase("training"), noted, progress:
            with contextlib.suppress(Abandoned):
                self._begin()
                while self.step < steps and not self._stopped():
                    self._train_step(self.step + 1, progress)
            if self.step:
                with phase("checkpoint", self.step):
                    self.saver.finish(self.step, self.unlogged)
            if self._stopped():
                self.note("stopped", f"by signal {self.stop.signal} after step {self.step}")
                self.stop.saved = True
                self.stop.leave()

    def _begin(self) -> None:
        if self.step == 0:
            self._evaluate(0)
        elif self.unlogged is not None:
            self._finish_step(self.unlogged)

    def _train_step(self, step: int, progress: StepProgress) -> None:
        started = time.perf_counter()
        with phase("generation", step):
            batch = self.sampler.fill(step, progress.generated)
        self.engine.rest()
        progress.training()
        train_started = time.perf_counter()
        with phase("update", step):
            stats = self.updater.run(batch.groups, step)
        sync_started = time.perf_counter()
        with phase("sync", step):
            self.engine.sync_weights()
        ended = time.perf_counter()
        self.step = step
        if stats.skipped_updates:
            self.note("skipped", f"{stats.skipped_updates} updates of step {step}")
        if self.logger is not None:
            self.logger.log_rollouts(batch)
        metrics = {
            "step": step,
            "update": self.updater.updates,
            "epoch": self.stream.epoch,
            **rollout_metrics(batch),
            **stats.metrics(),
            **stats.machine,
            "lr": self.updater.learning_rate(step),
            "time_rollout_s": batch.time_rollout_s,
            "time_reward_s": batch.time_reward_s,
            "time_train_s": sync_started - train_started,
            "time_sync_s": ended - sync_started,
            "tokens_per_s": _sampled_tokens(batch) / (ended - started),
            "peak_memory_gb": all_reduce_max({"gb": peak_memory_gb()}, self.world)["gb"],
        }
        self._finish_step(metrics)
        progress.step(step, metrics)

    def _finish_step(self, metrics: dict[str, float]) -> None:
        """Evaluates and saves where that is due, and logs the step's line. What a signal abandons of it is
        done when the run is resumed."""
        step, config = self.step, self.config
        self.unlogged, best = metrics, False
        if step == config.train.steps or (config.eval.every and step % config.eval.every == 0):
            metrics = {**metrics, **self._evaluate(step)}
            best = "eval_accuracy" in metrics and self.saver.note_evaluation(step, metrics["eval_accuracy"])
        if self.logger is not None:
            self.logger.log_step(metrics)
        self.unlogged = None
        if best or (config.checkpoint.every and step % config.checkpoint.every == 0):
            with phase("checkpoint", step):
                self.saver.save(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluates on the held-out prompts, where there are any; returns the step's eval metrics."""
        if self.held_out is None:
            return {}
        self.console.print(f"evaluating on {len(self.held_out.prompts)} held-out prompts", soft_wrap=True)
        arguments = (self.engine, self.held_out.scorer, self.tokenizer, self.generating, self.stop.abandon)
        asked = len(self.held_out.prompts) * self.config.eval.samples_per_prompt // self.world.data_size + 1
        with phase("evaluation", step), generation_advice(self.config, asked, "evaluation", self.world):
            result, responses = evaluate(self.config, step, self.held_out.prompts, *arguments)
        if self.logger is not None:
            self.logger.log_eval(result, responses)
        self.console.print(describe_eval(result), soft_wrap=True)
        return {"eval_accuracy": result.accuracy, "eval_pass_at_k": result.pass_at_k}

    def _stopped(self) -> bool:
        """Whether a signal came, on any rank: all of them then stop at the same place."""
        self.stop.signal = int(all_reduce_max({"signal": self.stop.signal}, self.world)["signal"])
        return self.stop.signal != 0

    def _say_stopping(self, signum: int) -> None:
        self.console.print(
            "stopping: what is being generated is abandoned, an update is finished, then the run is saved; "
            "the same signal again stops at once",
            soft_wrap=True,
        )

    def note(self, kind: str, message: str) -> None:
        """A line of events.jsonl, for `dapo status`."""
        if self.logger is not None:
            self.logger.log_event(kind, self.step, message)

    def finish(self) -> None:
        """Saves the trained model, writes the report and says what came of the run."""
        if self.config.train.save_model:
            with phase("saving the model", self.step):
                self._save_model()
        if self.logger is None:
            return
        report = write_report(self.logger.run)
        self.note("finished", f"{self.step} steps")
        evaluations = self.logger.evaluations()
        if len(evaluations) > 1:
            self.console.print(describe_gain(evaluations[0], evaluations[-1]), soft_wrap=True)
        memory = peak_memory_bytes() / 1e9
        self.console.print(f"{self.step} steps, {self.updater.updates} updates, peak memory {memory:.1f} GB")
        self.console.print(f"report: {report}", soft_wrap=True)

    def _save_model(self) -> None:
        model, state = self.policy.model, full_state_dict(self.policy, self.world)
        adapter = adapter_state_dict(self.policy, self.world)
        if self.logger is not None:
            save_model(model, self.tokenizer, self.logger.run / "model", state)
            if adapter:
                save_adapter(model, adapter, self.logger.run / "adapter")

    def close(self) -> None:
        if self.logger is not None:
            self.logger.close()
        self.saver.close()
        self.engine.close()
        for judged in (self.data, self.held_out):
            if judged is not None:
                judged.scorer.close()
        self.watchdog.close()
        self.world.close()


def _sampled_tokens(batch: RolloutBatch) -> int:
    return sum(len(sample.completion.token_ids) for group in batch.sampled for sample in group.samples)
