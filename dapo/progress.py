"""What a person sees while a run goes on: a bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .evaluate import EvalResult
from .sampling import RolloutBatch


class StepProgress:
    """The bar over a run's steps, `done` of which were made before."""

    def __init__(self, console: Console, done: int, steps: int, groups_per_step: int) -> None:
        self.console, self.done, self.steps = console, done, steps
        self.groups_per_step = groups_per_step
        self.started = time.perf_counter()
        self.bar = Progress(
            TextColumn("step {task.fields[current]}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("sampling", total=steps, completed=done, current=done + 1, left="")
        self.summary = ""

    def __enter__(self) -> StepProgress:
        self.bar.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.bar.stop()

    def generated(self, batch: RolloutBatch) -> None:
        kept = f"groups {len(batch.groups)}/{self.groups_per_step} after {batch.num_gen_batches} batches"
        self.bar.update(self.task, description=f"{self.summary}  [dim]{kept}[/dim]")

    def training(self) -> None:
        self.bar.update(self.task, description=f"{self.summary}  [dim]updating[/dim]")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.summary = (
            f"reward {metrics['reward_mean']:+.2f}  acc {metrics['accuracy']:.2f}  "
            f"entropy {metrics['entropy']:.2f}  len {metrics['response_length_mean']:.1f}  "
            f"kept {metrics['groups_kept']}/{metrics['groups_sampled']}  {metrics['tokens_per_s']:.0f} tok/s"
        )
        pace = (time.perf_counter() - self.started) / (step - self.done)
        left = f"left {pace * (self.steps - step):.0f} s"
        current = min(step + 1, self.steps)
        self.bar.update(self.task, completed=step, description=self.summary, current=current, left=left)
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.steps}  {self.summary}  {left}", soft_wrap=True)


def describe_eval(result: EvalResult) -> str:
    """One line on an evaluation."""
    line = (
        f"held-out accuracy at step {result.step}: {result.accuracy:.1%} (95 % interval "
        f"{100 * result.accuracy_low:.1f} to {100 * result.accuracy_high:.1f}; "
        f"{result.prompts} prompts x {result.samples_per_prompt} samples at T = {result.temperature:g}"
    )
    if result.top_p < 1:
        line += f", top_p = {result.top_p:g}"
    line += f"), right answer anywhere {result.answer_anywhere:.1%}"
    if result.greedy_accuracy is not None:
        line += f"; greedy {result.greedy_accuracy:.1%}, anywhere {result.greedy_answer_anywhere:.1%}"
    return line


def describe_gain(before: EvalResult, after: EvalResult) -> str:
    """One line on what training changed."""
    figures = [
        ("sampled", before.accuracy, after.accuracy),
        ("greedy", before.greedy_accuracy, after.greedy_accuracy),
        ("right answer anywhere", before.answer_anywhere, after.answer_anywhere),
    ]
    parts = [
        f"{name} {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points)"
        for name, first, last in figures
        if first is not None
    ]
    return f"held-out accuracy before -> after: {', '.join(parts)}"
