"""The tests mirror the rooms of the package, plus `papers/`, `system/` (kills, fuzzing, documentation) and `values/`.

No test imports another test. What several of them need is here: `support` (runs, comparisons, processes), `toys` (a small
problem of each kind), `methods` (hyper-parameters of every method), `bare` (problems with only the abstract methods) and
`flower` (a deployment in memory).
"""
