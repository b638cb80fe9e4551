"""What a rollout engine is asked and what it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. The defaults are the policy's own distribution; every engine sets all of them
    explicitly, because engines' and models' own defaults differ."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Request:
    """One response to one prompt."""

    prompt_ids: list[int]
    noise_key: tuple[int, ...]
    """Seeds this response's sampling noise, for instance (seed, step, prompt, sample): what is sampled
    depends on neither the batch nor the rank it runs in."""
    begun: tuple[int, ...] = ()
    """Tokens of the response that were generated before: what is asked for is the rest. They count towards
    `max_new_tokens`, of which they leave at least one."""


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    """EOS included, where the response ended by itself; without what was begun before."""
    logprobs: list[float]
    """Of each token, in the distribution it was sampled from."""
    finished: bool
    """False: cut at `max_new_tokens`."""


OnCompletion = Callable[[int, Completion], None]
"""Called with a request's position and its completion, from the thread that called `generate`."""


class RolloutEngine(Protocol):
    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_completion: OnCompletion | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """One completion for each request, in order.

        Args:
            on_completion: called once for each request, in any order, as soon as its completion is there:
                what it starts goes on beside the generation of the rest. What it raises ends the generation.
            check: called every few tokens at least. What it raises ends the generation.
        """
        ...

    def sync_weights(self) -> None:
        """Makes the engine sample from the policy as it is now. Every rank calls it."""
        ...

    def rest(self) -> None:
        """Nothing is generated until the next `sync_weights`: memory may be freed."""
        ...

    def close(self) -> None: ...


class Generation(Protocol):
    """Responses under way. Their numbers are the positions of the requests."""

    def advance(self) -> list[tuple[int, Completion]]:
        """Generates on for a moment, and returns the responses that have ended since."""
        ...

    @property
    def running(self) -> bool:
        """Whether a response has not ended yet."""
        ...

    def stop(self) -> dict[int, Completion]:
        """Ends it. Of each response that has not ended: what there is of it, with `finished` false."""
        ...


class InterruptibleEngine(RolloutEngine, Protocol):
    """One whose responses can be left in the middle, and gone on with after a sync."""

    def start(self, requests: Sequence[Request], sampling: SamplingParams) -> Generation:
        """As `generate`, without waiting. There is one generation at a time, and no sync meanwhile."""
        ...


def noise_seed(key: tuple[int, ...]) -> int:
    """63 bits that depend on a noise key alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
