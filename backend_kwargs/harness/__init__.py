"""How `compare` and the benchmark suite run one model several ways: reference results, trials, isolation.

`study` is a model with eager's results and the reference's, `trial` one way to run it: compile, check, time, check
again, each compiled apart; `models` are those of factories, and `named_models` of libraries.
"""
