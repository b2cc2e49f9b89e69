"""The use of a lower precision for a graph."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class PrecisionUse:
    """The use of a precision: its error, at most `max_error`, and the bytes of the weights converted for it.

    `reason` says why the precision is not used, or is "". A graph with dynamic sizes is measured again for new sizes:
    `error` is then the largest, and `refused` has the reason for sizes that run in eager instead.
    """

    precision: str
    error: float | None
    max_error: float | None
    nbytes: int = 0
    products: int = 0
    reason: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.reason:
            return f"precision {self.precision} is not used: {self.reason}"
        error = "" if self.error is None else f", error {self.error:.2g}, max_error={self.max_error:g}"
        held = f", {self.nbytes / 2**20:.1f} MiB of weights" if self.nbytes else ""
        products = f", {self.products} products" if self.products else ""  # an engine does not count them
        refused = "".join(f"; not used for {sizes}, in eager: {why}" for sizes, why in [*self.refused.items()])
        return f"precision {self.precision}: {f'{products}{error}{held}'.removeprefix(', ') or 'used'}{refused}"
