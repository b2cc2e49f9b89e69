"""Compiled functions that compile nothing while they serve.

`declared` is what a user declares: names of sizes, their values, buckets. `targets` are the kinds of compiled callables
that can be sealed, `warming` compiles, calls and checks them ahead, and `sealed` serves.
"""
