"""Models tuned on many devices and machines: a plan of units, who takes which, and what came of each.

`board` reads the plan, makes its units, and asks the store which are done or claimed. `scheduling` says which unit
runs next, on this machine's devices or on a Ray cluster, and sums up what came of each: a unit has a process, which is
a `worker`, which races it (`racing`). `audit` measures decisions again later.
"""
