"""The number of attempts of each attack: as many as two minutes of CI allow, times BACKEND_KWARGS_FAULTS."""

import os

TIMES = int(os.environ.get("BACKEND_KWARGS_FAULTS", "1"))
