"""Compiled modules: built and checked once, saved as a bundle, and served elsewhere without compiling."""
