"""torch's structured trace, which tlparse shows."""

from torch._logging._internal import trace_structured
