"""How it is measured: processes, trials, timers, and the records that they write."""
