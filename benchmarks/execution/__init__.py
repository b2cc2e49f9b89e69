"""Execution of measurements: processes, trials, timers, and the records that they write."""
