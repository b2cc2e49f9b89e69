"""How often each attack is tried: as often as two minutes of CI allow, times BACKEND_KWARGS_FAULTS."""

import os

TIMES = int(os.environ.get("BACKEND_KWARGS_FAULTS", "1"))
