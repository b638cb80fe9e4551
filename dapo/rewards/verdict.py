"""What judging a response yields."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    correct: bool
    failure: str | None = None
    """Why the response could not be judged: it took too long, crashed its process or made the scorer raise.
    It counts as wrong."""
    answer: str | None = None
    """The final answer that was judged, in one spelling; None where the response gives none."""
    terms: dict[str, float] = field(default_factory=dict)
    """Of each custom reward term, its value before the weight."""

    @property
    def failed(self) -> bool:
        return self.failure is not None
