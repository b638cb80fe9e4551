"""Text for a prompt, with the log-probs it was sampled at."""

from .base import Completion, Request, RolloutEngine, SamplingParams
from .hf import HFEngine

__all__ = ["Completion", "HFEngine", "Request", "RolloutEngine", "SamplingParams"]
