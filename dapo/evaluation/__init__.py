"""`dapo eval`: problems, samples, verdicts on disk as they come, and what they add up to."""
