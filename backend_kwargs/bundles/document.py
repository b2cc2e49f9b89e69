"""Building and serving a bundle as data of a page: what is in it, and how long its first call takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend_kwargs.bundles.disk.manifest import GraphPart, Manifest
from backend_kwargs.interval import Interval
from backend_kwargs.page import document as page
from backend_kwargs.page.values import environment_of, interval_of, now

FIRST = "the first call"
COMPILING = "compiling"


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The seconds until a bundle's first result, and the time of a call after it."""

    importing_s: float
    ready_s: float
    first_s: float
    call: Interval

    @property
    def total_s(self) -> float:
        """Loading, deploying and the first call."""
        return self.ready_s + self.first_s


def built(manifest: Manifest, title: str, notes: Sequence[str]) -> page.Document:
    """Return what was built."""
    compiled = f", compiled in {manifest.cold_s:.2f} s" if manifest.cold_s else ""
    count = f"{len(manifest.graphs)} graph{'' if len(manifest.graphs) == 1 else 's'}"
    text = f"{count} of {manifest.module}{compiled}."
    return _document(manifest, title, "backend-kwargs build", page.Verdict(text=text), notes)


def served(manifest: Manifest, title: str, first: FirstCall, notes: Sequence[str]) -> page.Document:
    """Return how long a bundle took to serve its first call, beside the compiling that it saves."""
    import msgspec

    of_compiling = f", {first.total_s / manifest.cold_s:.1%} of compiling" if manifest.cold_s else ""
    call = f"a call takes {first.call.median * 1e3:.3g} ms"
    text = f"The first result came after {first.total_s:.2f} s{of_compiling}; {call}."
    document = _document(manifest, title, "backend-kwargs run", page.Verdict(text=text), notes)
    return msgspec.structs.replace(document, speedups=tuple(_speedups(manifest, first)))


def _speedups(manifest: Manifest, first: FirstCall) -> Sequence[page.Speedups]:
    steps = {
        "importing torch's compiler": first.importing_s,
        "load and deploy": first.ready_s,
        "first call": first.first_s,
    }
    rows = [_row("load, deploy and first call", first.total_s, manifest.cold_s)]
    if manifest.cold_s:
        rows.insert(0, _row(COMPILING, manifest.cold_s, manifest.cold_s, note="baseline"))
    rows += [_row(name, seconds) for name, seconds in steps.items()]
    call = page.Row(name="a call", latency=interval_of(first.call))
    over = COMPILING if manifest.cold_s else ""
    return page.Speedups(title=FIRST, over=over, rows=tuple(rows)), page.Speedups(title="a call", rows=(call,))


def _row(name: str, seconds: float, over: float | None = None, note: str = "") -> page.Row:
    ratio = over / seconds if over and seconds else None
    return page.Row(
        name=name,
        note=note,
        speedup=interval_of(Interval(ratio, ratio, ratio)) if ratio else None,
        latency=interval_of(Interval(seconds, seconds, seconds)),
    )


def _document(manifest: Manifest, title: str, by: str, verdict: page.Verdict, notes: Sequence[str]) -> page.Document:
    return page.Document(
        title=title,
        subtitle=f"a bundle of {manifest.module}",
        made=now(),
        by=by,
        environment=environment_of(manifest.environment),
        verdict=verdict,
        graphs=tuple(_graph(part, manifest.config) for part in manifest.graphs),
        notes=tuple(notes),
    )


def _graph(part: GraphPart, config: Mapping[str, object]) -> page.Graph:
    given = config.get("options")
    users = given if isinstance(given, Mapping) else {}
    options = [(name, value, "user") for name, value in users.items()]
    options += [(name, value, "auto") for name, value in part.options.items()]
    return page.Graph(
        name=f"graph {part.key[:12]}",
        backend=str(config.get("backend") or ""),
        winner=part.winner or "",
        options=tuple(page.Option(name=str(name), value=repr(value), source=source) for name, value, source in options),
        notes=(part.why,) if part.why else (),
    )
