"""Algorithm 1 of the paper: sample a batch, judge it, filter it, update on it, again."""

from __future__ import annotations

import time

import torch
from rich.console import Console

from .config import Config
from .data import Prompt, PromptSet, PromptStream, load_prompts
from .errors import UserError
from .evaluate import EvalResult, evaluate
from .logging import RunLogger
from .metrics import peak_memory_bytes, peak_memory_gb, rollout_metrics
from .model_facts import max_positions
from .model_files import save_model
from .parallel import all_reduce_max, full_state_dict, open_world, refresh
from .policy_setup import build_policy
from .progress import StepProgress, describe_eval, describe_gain
from .report import write_report
from .rewards import Scorer
from .rollout import HFEngine
from .sampling import RolloutBatch, Sampler
from .update import Updater


class Trainer:
    """One run, from its configuration to its report. Raises `UserError` before anything is written when the
    configuration, the model or the data cannot work."""

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config = config
        self.world = open_world(config.parallel)
        # One process speaks and writes for all.
        self.console = (console or Console()) if self.world.is_main else Console(quiet=True)
        torch.manual_seed(config.seed)
        built = build_policy(config, self.world)
        self.policy, self.rollout_model, self.tokenizer = built.policy, built.rollout_model, built.tokenizer
        self.held_out = self._load_held_out()
        train = load_prompts("train", config.data.train, config.data, self.tokenizer, self.held_out)
        self.console.print(f"train data: {train.describe()}", soft_wrap=True)
        self.stream = PromptStream(train.prompts, config.seed)
        self._check_length(train.prompts)
        self.engine = HFEngine(self.rollout_model, built.eos_token_ids, config.rollout.max_sequences)
        self.scorer = self._scorer(train)
        self.eval_scorer = self._scorer(self.held_out) if self.held_out else None
        self.sampler = Sampler(config, self.stream, self.engine, self.scorer, self.tokenizer, self.world)
        self.updater = Updater(config, self.policy, self.world)
        self.logger = RunLogger(config) if self.world.is_main else None
        self.step = 0
        """Last step whose line is in metrics.jsonl."""
        self.evaluations: list[EvalResult] = []

    def _load_held_out(self) -> PromptSet | None:
        if self.config.data.eval is None:
            if self.config.eval.every:
                raise UserError("eval.every needs data.eval: name held-out prompts there")
            return None
        held_out = load_prompts("eval", self.config.data.eval, self.config.data, self.tokenizer)
        self.console.print(f"held-out data: {held_out.describe()}", soft_wrap=True)
        return held_out

    def _scorer(self, prompts: PromptSet) -> Scorer:
        scorer = Scorer(self.config.reward, prompts.source)
        scorer.check_rows(prompts.prompts)
        return scorer

    def _check_length(self, prompts: list[Prompt]) -> None:
        limit = max_positions(self.rollout_model)
        longest = max(len(prompt.ids) for prompt in prompts)
        if limit is not None and longest + self.config.rollout.max_response_length > limit:
            raise UserError(
                f"the longest prompt ({longest} tokens) and rollout.max_response_length "
                f"({self.config.rollout.max_response_length}) go beyond the model's {limit} positions: lower "
                "data.max_prompt_length or rollout.max_response_length"
            )

    def train(self) -> None:
        config = self.config
        self.evaluate(step=0)
        with StepProgress(self.console, config.train.steps, config.rollout.prompts_per_step) as progress:
            for step in range(1, config.train.steps + 1):
                started = time.perf_counter()
                batch = self.sampler.fill(step, progress.generated)
                progress.training()
                train_started = time.perf_counter()
                stats = self.updater.run(batch.groups, step)
                sync_started = time.perf_counter()
                refresh(self.rollout_model, self.policy)
                self.engine.sync_weights()
                ended = time.perf_counter()
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
                if step == config.train.steps or (config.eval.every and step % config.eval.every == 0):
                    metrics.update(self.evaluate(step))
                if self.logger is not None:
                    self.logger.log_step(metrics, batch)
                self.step = step
                progress.step(step, metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluates on the held-out prompts, where there are any; returns the step's eval metrics."""
        if self.held_out is None:
            return {}
        self.console.print(f"evaluating on {len(self.held_out.prompts)} held-out prompts", soft_wrap=True)
        arguments = (self.engine, self.eval_scorer, self.tokenizer, self.world)
        result, responses = evaluate(self.config, step, self.held_out.prompts, *arguments)
        self.evaluations.append(result)
        if self.logger is not None:
            self.logger.log_eval(result, responses)
        self.console.print(describe_eval(result), soft_wrap=True)
        return {"eval_accuracy": result.accuracy, "eval_pass_at_k": result.pass_at_k}

    def finish(self) -> None:
        """Saves the trained model, writes the report and says what came of the run."""
        if self.config.train.save_model:
            self._save_model()
        if self.logger is None:
            return
        report = write_report(self.logger.run)
        if len(self.evaluations) > 1:
            self.console.print(describe_gain(self.evaluations[0], self.evaluations[-1]), soft_wrap=True)
        memory = peak_memory_bytes() / 1e9
        self.console.print(f"{self.step} steps, {self.updater.updates} updates, peak memory {memory:.1f} GB")
        self.console.print(f"report: {report}", soft_wrap=True)

    def _save_model(self) -> None:
        state = full_state_dict(self.policy, self.world) if self.world.distributed else None
        if self.logger is not None:
            save_model(self.policy.model, self.tokenizer, self.logger.run / "model", state)

    def close(self) -> None:
        if self.logger is not None:
            self.logger.close()
        self.engine.close()
        for scorer in (self.scorer, self.eval_scorer):
            if scorer is not None:
                scorer.close()
        self.world.close()


def _sampled_tokens(batch: RolloutBatch) -> int:
    return sum(len(sample.completion.token_ids) for group in batch.sampled for sample in group.samples)
