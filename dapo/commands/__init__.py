"""The commands of `dapo`, one a file: `add` describes its arguments, `run` does the work."""
