"""`dapo eval`: loads a model and problems, samples and judges what is not there yet, and sums it up."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import UserError
from ..evaluate import Judged, Task, respond
from ..model_facts import max_positions
from ..model_files import load_model, load_tokenizer
from ..rewards import Scorer
from ..rollout import HFEngine, SamplingParams
from ..row_modes import check_mode_name
from .options import (
    EvalOptions,
    find_model,
    fingerprint,
    model_config,
    reward_config,
    words_of_options,
)
from .problems import load_problems
from .progress import EvalProgress
from .results import Results, check_settings, read_summary, write_settings
from .summary import describe, summarise, write_summary


class Evaluation:
    """One evaluation of a model on a data file. What its folder holds of an interrupted run counts."""

    def __init__(self, options: EvalOptions, command: str, console: Console) -> None:
        """Raises `UserError` when the model, the data or the folder cannot work; writes nothing."""
        self.options, self.command, self.console = options, command, console
        self.folder = options.folder
        self.results: Results | None = None
        self.engine: HFEngine | None = None
        self.scorer: Scorer | None = None
        if options.mode is not None:
            check_mode_name(options.mode, "--mode", per_row=True)
        with words_of_options():
            self.model = find_model(options.model)
            self.tokenizer = load_tokenizer(model_config(options, self.model))
            self.problems = load_problems(options, self.tokenizer)
        for line in (f"data: {self.problems.describe()}", *self.problems.notes(options)):
            self.console.print(line, soft_wrap=True)
        self.ks = self._voters()
        self.settings = self._settings()
        self.is_new = not check_settings(self.folder, self.settings)

    def _voters(self) -> list[int]:
        """The k of pass@k and maj@k."""
        n = self.problems.fewest_samples
        if self.options.ks is None:
            return sorted({*(2**i for i in range(n.bit_length())), n})
        over = [k for k in self.options.ks if k > n]
        if over:
            raise UserError(
                f"-k {over[0]} is over the {n} samples of a problem: lower it, or raise --samples"
            )
        return sorted(set(self.options.ks))

    def _settings(self) -> dict[str, Any]:
        """What defines the results. Not among them: `--max-sequences`, -k."""
        options, columns, local = self.options, self.problems.columns, Path(self.options.data)
        names = ("temperature", "top_p", "max_tokens", "seed", "answer_pattern", "limit")
        names += ("chat_template", "template", "max_prompt_tokens", "dtype")
        return {
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model,
            "model_fingerprint": fingerprint(self.model),
            "data": str(local.resolve()) if local.exists() else options.data,
            "problems_sha256": self.problems.digest(),
            "prompt_column": columns.prompt_column,
            "answer_column": columns.answer_column,
            "samples": self.problems.samples,
            "mode": options.mode or self.problems.source.default_mode,
            **{name: getattr(options, name) for name in names},
        }

    def run(self) -> dict[str, Any]:
        """Generates and judges what is missing, writes the summary and returns it."""
        if self.is_new:
            self._load_engine()  # may refuse, so before anything is written
            write_settings(self.folder, self.settings)
        places = [(i, s) for i, p in enumerate(self.problems.problems) for s in range(p.samples)]
        self.results = Results(self.folder, places)
        before = read_summary(self.folder)
        facts = {"date": before.get("date"), "tokens_per_s": before.get("tokens_per_s")}
        if self.results.missing:
            facts["tokens_per_s"] = self._generate(self.results.missing)
            facts["date"] = None
        facts["date"] = facts["date"] or datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        facts |= {"command": self.command, "left_out": dict(self.problems.dropped)}
        rows = self.results.finish()
        summary = summarise(rows, self.settings, self.ks, facts)
        paths = write_summary(self.folder, summary, rows)
        self.console.print(describe(summary), soft_wrap=True)
        for path in paths:
            self.console.print(str(path), soft_wrap=True)
        return summary

    def _load_engine(self) -> None:
        options = self.options
        with words_of_options():
            self.scorer = Scorer(reward_config(options), self.problems.source)
            self.scorer.check_rows([problem.prompt for problem in self.problems.problems])
            loaded = load_model(model_config(options, self.model))
        model = loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._check_length(max_positions(model))
        self.engine = HFEngine(model, loaded.eos_token_ids, options.max_sequences)

    def _generate(self, missing: list[tuple[int, int]]) -> float:
        """Tokens per second of doing so."""
        options, problems = self.options, self.problems.problems
        done, total = len(self.results.lines), len(self.results.places)
        if done:
            self.console.print(f"going on after {done} of {total} responses", soft_wrap=True)
        if self.engine is None:
            self._load_engine()
        tasks = [
            Task(problems[problem].prompt, (options.seed, problems[problem].identity, sample))
            for problem, sample in missing
        ]
        sampling = SamplingParams(options.max_tokens, options.temperature, options.top_p)
        if options.greedy:
            sampling = SamplingParams(options.max_tokens, temperature=0)
        with EvalProgress(self.console, total, done) as progress:

            def on_judged(i: int, judged: Judged) -> None:
                self.results.add(_row(missing[i], tasks[i], judged))
                progress.add(judged.verdict.correct, judged.length)

            respond(tasks, sampling, self.engine, self.scorer, self.tokenizer, on_judged)
        return progress.tokens_per_s

    def _check_length(self, limit: int | None) -> None:
        longest, most = self.problems.longest_prompt, self.options.max_tokens
        if limit is not None and longest + most > limit:
            raise UserError(
                f"the longest prompt ({longest} tokens) and --max-tokens ({most}) go beyond the model's "
                f"{limit} positions: use --max-tokens {max(limit - longest, 1)} or less, or leave out long "
                "prompts by --max-prompt-tokens"
            )

    def stopped(self) -> str:
        """How far it came, for whoever stopped it."""
        if self.results is None:
            return "before the first response; nothing was written"
        total = len(self.results.places)
        return f"after {len(self.results.lines)} of {total} responses; the same command goes on from there"

    def close(self) -> None:
        for used in (self.engine, self.scorer, self.results):
            if used is not None:
                used.close()


def _row(place: tuple[int, int], task: Task, judged: Judged) -> dict[str, Any]:
    return {
        "problem": place[0],
        "sample": place[1],
        "prompt": task.prompt.text,
        "response": judged.text,
        "answer": task.prompt.row.answer,
        "extracted": judged.verdict.answer,
        "accuracy": int(judged.verdict.correct),
        "failure": judged.verdict.failure,
        "length": judged.length,
        "truncated": judged.truncated,
    }
