"""Numbers that must not change: small fixed runs, what they gave, and a test that they still give it.

`adapter.py` is the only file that calls the library. `cases.py`, `studies.py` and `tables.py` say in neutral words what
is run, `expected/` holds what came out, `run.py` writes that, and `compare` asks two checkouts for equal bits.
"""
