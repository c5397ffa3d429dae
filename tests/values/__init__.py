"""Numbers that must not change: small fixed runs, what they gave, and a test that they still give it.

`adapter.py` is the only file that calls the library. `cases.py`, `studies.py` and `tables.py` say in neutral words what
is run, `expected/` holds what came out, `run.py` writes that, and `compare` asks two checkouts for equal bits.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# The toys of the other tests, and their network in memory, are used here too.
for _folder in (TESTS, *(p for p in sorted(TESTS.iterdir()) if p.is_dir())):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
