"""A compact trainer that runs the whole DAPO algorithm (arXiv 2503.14476)."""
