"""The products worth tuning: those far from what their flops and bytes need."""

import math
from collections.abc import Callable, Mapping

from backend_kwargs.auto.candidates import RaceCandidate, tuning
from backend_kwargs.auto.graph_stats import GROUPED, PADDED, WITH_BIAS, Product
from backend_kwargs.backends.inductor.tuned_products import product_name

SHARE = 0.3  # of a product's excess, what tuning it removes: 0.6 of Mixtral's grouped products (H200)
READING = 0.5  # the same where it waits for memory: 0.55 of one with a single row
FEW_FLOPS = 4  # per byte; a product of one row in half precision has 1


def candidate_of_products(
    excess: Mapping[Product, float], least_s: float, fits: Callable[[RaceCandidate], bool]
) -> RaceCandidate | None:
    """Return the tuning of the products that save `least_s` of a call or more, the largest that fit; None if none does.

    `excess` are the seconds of a call that each takes beyond what it needs.
    """
    saves = {product: _share(product) * seconds for product, seconds in excess.items() if _sizes(product) is not None}
    grouped = [product for product in saves if product.operator in GROUPED]  # tuned in any case
    largest = sorted(saves, key=lambda product: (product in grouped, saves[product]), reverse=True)
    chosen = [product for product in largest if saves[product] >= least_s or product in grouped]
    while chosen:
        saved_s = sum(saves[product] for product in chosen)
        candidate = tuning(sorted({_name(product) for product in chosen}), len(chosen), saved_s)
        if fits(candidate):
            return candidate if saved_s >= least_s else None
        chosen.pop()
    return None


def _share(product: Product) -> float:
    """Return the share of a product's excess that tuning it is expected to remove."""
    return READING if 0 < product.flops < FEW_FLOPS * product.bytes else SHARE


def after_tuning(library: Mapping[Product, float], names: list[str], saved_s: float) -> dict[Product, float]:
    """Return the seconds of library kernels, those of the tuned `names` reduced by `saved_s` of a call."""
    spent = sum(product.count * seconds for product, seconds in library.items() if _name(product) in names)
    left = max(1 - saved_s / spent, 0.0) if spent else 1.0
    return {product: seconds * (left if _name(product) in names else 1.0) for product, seconds in library.items()}


def _name(product: Product) -> str:
    """Return the name by which `tuned_products` chooses the product, "" if max_autotune does not tune it."""
    sizes = _sizes(product)
    return product_name(*sizes) if sizes else ""


def _sizes(product: Product) -> tuple[int, int, int] | None:
    """Return the rows, columns and summands of what max_autotune tunes, as Inductor counts them; else None."""
    args = product.call[1]
    if product.operator in PADDED | GROUPED:
        left, right = args[1:3] if product.operator in WITH_BIAS else args[:2]
        return left.shape[-2], right.shape[-1], left.shape[-1]
    if product.operator == "convolution":
        images, weight = args[:2]
        return images.shape[0] * math.prod(images.shape[2:]), weight.shape[0], weight.shape[1]
    return None
