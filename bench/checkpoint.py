"""What a checkpoint costs the training loop: steps beside which one is written, against steps that are alone.

    python -m bench.checkpoint [--rounds 4] [--model models/SmolLM2-135M-Instruct]

Both kinds do the same work in turns, with the quickstart's sizes: generation batches of fixed prompts, and
the updates on groups sampled before. The checkpoint is of training in fp32: weights and AdamW's two moments.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console

from dapo.config import load_config
from dapo.rollout import Request, SamplingParams
from dapo.trainer import Trainer

BATCHES = 2
"""Generation batches of a step."""


class Work:
    """Steps of equal work, in a run of its own."""

    def __init__(self, model: str, folder: str) -> None:
        settings = [f"run_dir={folder}/run", f"model.path={model}", "data.eval=null"]
        config = load_config("configs/quickstart.yaml", [*settings, "logging.tensorboard=false"])
        self.trainer = Trainer(config, Console(quiet=True))
        self.groups = self.trainer.sampler.fill(1).groups
        self.steps = 1
        size = config.rollout.group_size
        prompts = self.trainer.stream.take(config.prompts_per_generation)
        self.requests = [Request(p.ids, (0, p.index, sample)) for p in prompts for sample in range(size)]
        self.sampling = SamplingParams(config.rollout.max_response_length)

    def step(self) -> float:
        began = time.perf_counter()
        for _ in range(BATCHES):
            self.trainer.engine.generate(self.requests, self.sampling)
        self.trainer.updater.run(self.groups, self.steps)
        return time.perf_counter() - began

    def save(self) -> float:
        """Begins a save; how long that took."""
        began = time.perf_counter()
        self.trainer.saver.save(self.steps)
        return time.perf_counter() - began

    def written(self) -> float:
        """Waits until it is written; how long that took."""
        began = time.perf_counter()
        self.trainer.saver.writer.wait()
        return time.perf_counter() - began


def measure(model: str, rounds: int) -> tuple[dict[str, float], int]:
    """Median seconds of each kind of step and of the parts of a save; bytes of a checkpoint."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(model, folder)
        work.step()  # allocates the optimizer's state
        work.save(), work.written()  # and the copy in host memory
        for _ in range(rounds):
            work.steps += 1
            alone = work.step()
            waits = work.save()
            beside = work.step()
            after = work.written()
            synchronous = work.save() + work.written()
            row = {"step alone": alone, "loop waits": waits, "step beside the writing": beside}
            row |= {"written so long after it": after, "synchronous save": synchronous}
            for name, value in row.items():
                seconds.setdefault(name, []).append(value)
        newest = max(Path(folder, "run", "checkpoints").glob("step_*"))
        size = sum(path.stat().st_size for path in newest.iterdir())
        work.trainer.close()
    return {name: statistics.median(values) for name, values in seconds.items()}, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    seconds, size = measure(arguments.model, arguments.rounds)
    for name, value in seconds.items():
        print(f"{name:>26} {value:7.2f} s")
    cost = seconds["loop waits"] + seconds["step beside the writing"] - seconds["step alone"]
    print(f"a checkpoint of {size / 1e9:.2f} GB costs {cost / seconds['step alone']:.1%} of a step")


if __name__ == "__main__":
    main()
