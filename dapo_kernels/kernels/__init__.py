"""The row operations in Triton, one kernel a file. Importing this package imports nothing; its modules need
Triton, which is imported nowhere else.

    loss_rows.py      logits to loss, metrics and dlogits, in one launch
    logprob_rows.py   logits to log-probs and entropy; its backward
    row_math.py       the two sweeps over a row that both are made of
    token_math.py     the objective of a token and its derivative, in registers
    launch.py         checks, tile sizes and the layout of rows
"""
