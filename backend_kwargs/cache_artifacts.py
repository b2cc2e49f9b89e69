"""torch's cache artifacts together with the decisions of `auto`: saved by one process, loaded by another."""

import json
from io import BytesIO
from zipfile import BadZipFile, ZipFile

import torch

from backend_kwargs.auto.candidates import UNFROZEN
from backend_kwargs.auto.process_memory import load_decisions, settled_decisions
from backend_kwargs.compile_records import Record, records
from backend_kwargs.errors import warn_once, wrong_value
from backend_kwargs.facts.decision import as_json, parsed
from backend_kwargs.torch_internals.caches import CacheInfo

# The members of a zip file. torch's member can be passed to torch.compiler.load_cache_artifacts() without this package.
# Earlier releases wrote "decisions.json", with keys that no graph has any more.
OF_TORCH, DECISIONS = "torch_cache_artifacts.bin", "auto_decisions.json"


def save_cache_artifacts() -> tuple[bytes, CacheInfo] | None:
    """Return what this process compiled and what `auto` decided, as bytes; None if there is neither.

    Like torch.compiler.save_cache_artifacts(), and returns its information about the artifacts too. Frozen graphs are
    not included; a warning says so.
    """
    if frozen := sum(map(_frozen, records())):
        graphs = "1 graph is" if frozen == 1 else f"{frozen} graphs are"
        warn_once(
            f"{graphs} frozen, which bypasses Inductor's cache: expect a compile in a process that loads the artifacts."
        )
    saved, decisions = torch.compiler.save_cache_artifacts(), settled_decisions()
    if saved is None and not decisions:
        return None
    data, info = saved or (b"", CacheInfo())
    buffer = BytesIO()
    with ZipFile(buffer, "w") as file:
        file.writestr(OF_TORCH, data)
        file.writestr(DECISIONS, f"[{','.join(map(as_json, decisions))}]")
    return buffer.getvalue(), info


def _frozen(record: Record) -> bool:
    """Return whether the graph's code has parameters as constants."""
    facts = record.facts
    if not facts.options.get("freezing"):
        return False
    # Unfrozen code, raced only against frozen code, uses the cache: then the record does not tell about the winner.
    rows = facts.decision.rows if facts.decision else ()
    raced = any(row.name == UNFROZEN and row.status != "skipped" for row in rows)
    return raced or facts.cache not in ("hit", "miss")


def load_cache_artifacts(data: bytes) -> CacheInfo | None:
    """Fill torch's caches from the data of `save_cache_artifacts`; `auto` uses the decisions in it in this process.

    Load only data that you trust: torch's artifacts are code.

    Raises:
        BackendKwargsError: if `data` is anything else.

    """
    try:
        with ZipFile(BytesIO(data)) as file:
            of_torch, written = file.read(OF_TORCH), file.read(DECISIONS) if DECISIONS in file.namelist() else b"[]"
        decisions = [*map(parsed, json.loads(written))]
    except (BadZipFile, KeyError, TypeError, ValueError, AttributeError):
        got = data[:20] if isinstance(data, bytes) else data
        raise wrong_value("`data`", "what save_cache_artifacts returned", got) from None
    load_decisions(decisions)
    return torch.compiler.load_cache_artifacts(of_torch) if of_torch else None
