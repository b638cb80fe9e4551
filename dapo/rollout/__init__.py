"""Text for a prompt, with the log-probs it was sampled at."""

from .base import Completion, Generation, InterruptibleEngine, Request, RolloutEngine, SamplingParams
from .hf import HFEngine

__all__ = [
    "Completion",
    "Generation",
    "HFEngine",
    "InterruptibleEngine",
    "Request",
    "RolloutEngine",
    "SamplingParams",
]
