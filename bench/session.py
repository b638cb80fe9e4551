"""What pytest's hooks and `bench.run` share. (A conftest.py is imported under a name of its own.)"""

import pytest

RESULTS = pytest.StashKey[dict]()
"""WorkloadResults by the name of the workload."""
TELL = pytest.StashKey()
"""Set by `bench.run`: a function that is given a workload and what happens there (None: it is done)."""
