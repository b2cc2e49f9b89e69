"""Execution of measurements: processes, trials, timers, and the records that they write.

`session` runs shards within a budget and resumes them, each case by a `worker` in a `process` of its own, so that all
its peers are timed interleaved. `device_timer` times with a cold L2; `ceilings` and `roofline` measure the device's
best rates; `controls` are planted faulty peers that must be detected; `records` are JSON lines.
"""
