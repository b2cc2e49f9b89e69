"""Matrix products with epilogues: by pointers for any strides, and persistent through tensor descriptors (TMA)."""
# ruff: noqa: N803  Triton constants are written in capitals.

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from backend_kwargs.harness.trial import UnavailableError
from benchmarks.workloads.kernels.launch import config, dot, multiprocessors, tuned

GROUP = 8
FEW_ROWS = 16  # one tile of tensor cores: only the time to read the weights matters
MOST_COLUMNS_OF_TILES = 1 << 16


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the tile's row and column; `GROUP` rows of tiles are adjacent, so that they share columns in the L2."""
    width = GROUP * tiles_n
    first = tile // width * GROUP
    height = min(tiles_m - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def finished(acc, bias, scale_a, scale_b, at_m, at_n, m, n, EPILOGUE: tl.constexpr):
    """Apply the epilogue to one tile of sums."""
    if EPILOGUE == "gelu":
        acc += tl.load(bias + at_n, mask=at_n < n, other=0.0).to(tl.float32)[None, :]
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    elif EPILOGUE == "scales":
        acc *= tl.load(scale_a + at_m, mask=at_m < m, other=0.0)[:, None]
        acc *= tl.load(scale_b + at_n, mask=at_n < n, other=0.0)[None, :]
    return acc


@triton.jit
def by_pointers(
    a,
    b,
    c,
    bias,
    scale_a,
    scale_b,
    m,
    n,
    k,
    a_m,
    a_k,
    b_k,
    b_n,
    EVEN_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute one tile of `c`; rows past the end are read as earlier ones and never stored."""
    row, column = place(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    at_m, at_n, at_k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    left = a + (at_m % m)[:, None] * a_m + at_k[None, :] * a_k
    right = b + at_k[:, None] * b_k + (at_n % n)[None, :] * b_n
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, k, BK):
        if EVEN_K:
            tile_a = tl.load(left)
            tile_b = tl.load(right)
        else:
            tile_a = tl.load(left, mask=(at_k < k - start)[None, :], other=0.0)
            tile_b = tl.load(right, mask=(at_k < k - start)[:, None], other=0.0)
        acc = dot(tile_a, tile_b, acc)
        left += BK * a_k
        right += BK * b_k
    acc = finished(acc, bias, scale_a, scale_b, at_m, at_n, m, n, EPILOGUE)
    offsets = at_m.to(tl.int64)[:, None] * n + at_n[None, :]
    tl.store(c + offsets, acc.to(c.dtype.element_ty), mask=(at_m < m)[:, None] & (at_n < n)[None, :])


@triton.jit
def by_splits(
    a,
    b,
    c,
    partial,
    arrived,
    m,
    n,
    k,
    a_m,
    a_k,
    b_k,
    b_n,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute a share of the sums of one column of tiles; the last program adds the shares up."""
    column, split = tl.program_id(0), tl.program_id(1)
    at_m, at_n, at_k = tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(split * BK, k, SPLITS * BK):
        # Missing rows are not read: repeating one would take as long as reading the weights.
        left = a + at_m[:, None] * a_m + (start + at_k)[None, :] * a_k
        right = b + (start + at_k)[:, None] * b_k + (at_n % n)[None, :] * b_n
        if EVEN_K:
            tile_a = tl.load(left, mask=(at_m < m)[:, None], other=0.0)
            tile_b = tl.load(right)
        else:
            tile_a = tl.load(left, mask=(at_m < m)[:, None] & (at_k < k - start)[None, :], other=0.0)
            tile_b = tl.load(right, mask=(at_k < k - start)[:, None], other=0.0)
        acc = dot(tile_a, tile_b, acc)
    offsets, keep = at_m[:, None] * n + at_n[None, :], (at_m < m)[:, None] & (at_n < n)[None, :]
    if SPLITS == 1:
        tl.store(c + offsets, acc.to(c.dtype.element_ty), mask=keep)
    else:
        tl.store(partial + split * m * n + offsets, acc, mask=keep)
        tl.debug_barrier()
        if tl.atomic_add(arrived + column, 1) == SPLITS - 1:
            total = tl.zeros((BM, BN), tl.float32)
            for other in range(SPLITS):
                share = partial + other * m * n + offsets
                total += tl.load(share, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(c + offsets, total.to(c.dtype.element_ty), mask=keep)
            tl.store(arrived + column, 0)


@triton.jit
def by_descriptors(
    a,
    b,
    c,
    bias,
    scale_a,
    scale_b,
    m,
    n,
    k,
    B_BY_ROWS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Compute several tiles of `c`; `HALVES` stores a tile in two parts, so that it takes less shared memory."""
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    # Stores count their tiles separately, so that the next tile's loads need not wait for them.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, column = place(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, k, BK):
            tile_a = a.load([row * BM, start])
            if B_BY_ROWS:  # noqa: SIM108  both would be compiled, and one does not fit
                tile_b = b.load([start, column * BN])
            else:
                tile_b = b.load([column * BN, start]).T
            acc = dot(tile_a, tile_b, acc)
        stored += tl.num_programs(0)
        row, column = place(stored, tiles_m, tiles_n, GROUP)
        at_m, at_n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        acc = finished(acc, bias, scale_a, scale_b, at_m, at_n, m, n, EPILOGUE)
        if HALVES:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            c.store([row * BM, column * BN], first.to(c.dtype))
            c.store([row * BM, column * BN + BN // 2], second.to(c.dtype))
        else:
            c.store([row * BM, column * BN], acc.to(c.dtype))


def set_blocks(arguments: dict[str, Any]) -> None:
    """Give the descriptors the shapes of a configuration's tiles."""
    bm, bn, bk = (arguments[name] for name in ("BM", "BN", "BK"))
    arguments["a"].block_shape = [bm, bk]
    arguments["b"].block_shape = [bk, bn] if arguments["B_BY_ROWS"] else [bn, bk]
    arguments["c"].block_shape = [bm, bn // 2 if arguments["HALVES"] else bn]


def tiles(*table: tuple[int, int, int, int, int]) -> list[triton.Config]:
    """Return configurations for the pointer kernel: rows, columns, depth of a tile, warps, stages."""
    return [config(warps, stages, BM=bm, BN=bn, BK=bk) for bm, bn, bk, warps, stages in table]


def tma_tiles(*table: tuple[int, int, int, int, int, int]) -> list[triton.Config]:
    """Return configurations for the descriptor kernel: rows, columns, depth of a tile, warps, stages, halves."""
    return [
        config(warps, stages, set_blocks, BM=bm, BN=bn, BK=bk, HALVES=halves)
        for bm, bn, bk, warps, stages, halves in table
    ]


SMALL = tiles((16, 16, 32, 4, 1))[0]
LARGE = tiles(
    (128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4),
    (128, 128, 32, 4, 5), (64, 128, 64, 4, 4),
)  # fmt: skip
# Wide tiles read the few rows less often; splitting the depth gives work to each multiprocessor.
FEW = [
    config(warps, stages, BM=16, BN=bn, BK=bk, SPLITS=splits)
    for bn, bk, splits, warps, stages in (
        (128, 128, 8, 4, 3), (32, 256, 1, 4, 4), (64, 256, 8, 4, 3), (64, 128, 8, 4, 4), (32, 256, 4, 4, 4),
        (128, 128, 16, 8, 3), (64, 128, 1, 4, 4), (64, 256, 1, 8, 3), (16, 256, 1, 4, 4),
    )
]  # fmt: skip
# Unaligned rows are loaded number by number, through registers.
ODD = tiles((128, 128, 64, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 3), (64, 64, 64, 4, 3), (128, 128, 32, 8, 3))
EIGHT_BITS = tiles((128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 128, 4, 4), (128, 128, 128, 8, 4))
TMA_SMALL = tma_tiles((16, 32, 32, 4, 1, 1))[0]
TMA = tma_tiles(
    (128, 256, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 3, 0), (256, 128, 64, 8, 4, 1),
    (256, 128, 64, 8, 3, 1), (128, 128, 64, 4, 4, 1), (128, 128, 64, 8, 4, 0), (128, 128, 128, 8, 3, 1),
)  # fmt: skip
TMA_EIGHT_BITS = tma_tiles(
    (128, 256, 128, 8, 3, 1), (128, 256, 128, 8, 4, 1), (128, 256, 128, 8, 3, 0), (256, 128, 128, 8, 3, 1),
    (128, 128, 128, 4, 4, 1), (128, 128, 128, 8, 4, 0),
)  # fmt: skip
KEY = ("m", "n", "k", "EPILOGUE")
TMA_KEY = (*KEY, "B_BY_ROWS")

large = tuned(SMALL, LARGE, *KEY)(by_pointers)
few = tuned(config(4, BM=16, BN=16, BK=16, SPLITS=2), FEW, "m", "n", "k")(by_splits)
odd = tuned(SMALL, ODD, *KEY)(by_pointers)
eight_bits = tuned(SMALL, EIGHT_BITS, *KEY)(by_pointers)
tma = tuned(TMA_SMALL, TMA, *TMA_KEY)(by_descriptors)
tma_eight_bits = tuned(TMA_SMALL, TMA_EIGHT_BITS, *TMA_KEY)(by_descriptors)

Extras = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # bias, scale_a, scale_b
NOTHING: Extras = (None, None, None)


def product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, epilogue: str = "", extras: Extras = NOTHING
) -> torch.Tensor:
    """Return `a @ b` with its epilogue, by pointers."""
    if a.shape[0] <= FEW_ROWS and not epilogue:
        return product_of_few(a, b, dtype)
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=dtype, device=a.device)
    launched = chosen(a, b)
    launched[lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)](
        a, b, c, *extras, m, n, k, *a.stride(), *b.stride(), even(k, launched), epilogue, GROUP
    )
    return c


def chosen(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the pointer kernel with the tiles for these matrices."""
    if a.itemsize == 1:
        return eight_bits
    return large if aligned(a) and aligned(b) else odd


def even(k: int, launched: Any) -> bool:
    """Return whether the tiles of every configuration divide the depth."""
    return all(k % block.kwargs["BK"] == 0 for block in launched.configs)


def product_of_few(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `a @ b` for at most `FEW_ROWS` rows, the depth split among programs; one call at a time."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=dtype, device=a.device)
    splits = max(block.kwargs["SPLITS"] for block in few.configs)
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=a.device)
    few[lambda meta: (triton.cdiv(n, meta["BN"]), meta["SPLITS"])](
        a, b, c, partial, arrived(a.device), m, n, k, *a.stride(), *b.stride(), even(k, few)
    )
    return c


@cache
def arrived(device: torch.device) -> torch.Tensor:
    """Return a counter for each column of tiles; the kernel resets them to zero."""
    return torch.zeros(MOST_COLUMNS_OF_TILES, dtype=torch.int32, device=device)


def aligned(matrix: torch.Tensor) -> bool:
    """Return whether each row, or each column, starts at a multiple of 16 bytes."""
    return max(matrix.stride()) * matrix.itemsize % 16 == 0


def tma_product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, epilogue: str = "", extras: Extras = NOTHING
) -> torch.Tensor:
    """Return `a @ b` with its epilogue, through descriptors; raise UnavailableError for rows that TMA cannot read."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=dtype, device=a.device)
    by_rows = b.stride(1) == 1
    described = [descriptor(matrix) for matrix in (a, b if by_rows else b.t(), c)]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (min(multiprocessors(a.device), triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"])),)

    launched = tma_eight_bits if a.itemsize == 1 else tma
    launched[grid](*described, *extras, m, n, k, by_rows, epilogue, GROUP)
    return c


def descriptor(matrix: torch.Tensor) -> TensorDescriptor:
    """Return a matrix's descriptor, whose block shape the configuration sets."""
    if matrix.stride(1) != 1 or not aligned(matrix) or matrix.data_ptr() % 16:
        raise UnavailableError(
            f"TMA requires rows of multiples of 16 bytes, got strides {matrix.stride()!r}: use matmul."
        )
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [1, 1])


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b` for any strides and sizes."""
    return product(a, b, a.dtype)


def matmul_tma(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b` through tensor descriptors."""
    return tma_product(a, b, a.dtype)


def matmul_padded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b` through tensor descriptors, of copies with rows of multiples of 16 bytes."""
    (k, n), multiple = b.shape, 16 // a.itemsize
    deeper, wider = -k % multiple, -n % multiple
    padded = pad(a, (0, deeper)), pad(b, (0, wider, 0, deeper))
    return tma_product(*padded, a.dtype)[:, :n].contiguous()


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `gelu(x @ weight.T + bias)`."""
    return product(x, weight.t(), x.dtype, "gelu", (bias, None, None))


def linear_gelu_tma(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `gelu(x @ weight.T + bias)` through tensor descriptors."""
    return tma_product(x, weight.t(), x.dtype, "gelu", (bias, None, None))


def scaled_matmul(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Return `(a * scale_a) @ (b * scale_b)` in bf16, scales by row of `a` and column of `b`."""
    return product(a, b, torch.bfloat16, "scales", (None, scale_a, scale_b))


def scaled_matmul_tma(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Return `scaled_matmul` through tensor descriptors."""
    return tma_product(a, b, torch.bfloat16, "scales", (None, scale_a, scale_b))
