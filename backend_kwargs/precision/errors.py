"""Why a lower precision is not used. Imports no torch."""

from backend_kwargs.errors import BackendKwargsError


class UnfitPrecisionError(BackendKwargsError):
    """A graph cannot be computed in a precision; the message says why."""


class UnmeasuredError(UnfitPrecisionError):
    """The error of a call cannot be measured, for example because all its results are nan; that of another may be."""
