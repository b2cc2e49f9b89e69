"""What a race in the background has done up to now, and the decision as far as it is known."""

import time
from dataclasses import dataclass, field

from backend_kwargs.facts.decision import Decision


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened `at_s` seconds after the first call; the call in which it did was `pause_s` longer."""

    at_s: float
    what: str
    pause_s: float = 0.0


@dataclass(slots=True, weakref_slot=True)
class Timeline:
    """The events of one race in the background; `decision` is what is known, and `ended` whether no more follows."""

    decision: Decision | None = None
    events: list[Event] = field(default_factory=list)
    ended: bool = False
    began: float = field(default_factory=time.perf_counter)

    def note(self, what: str, pause_s: float = 0.0) -> None:
        """Add an event that has just ended."""
        self.events.append(Event(time.perf_counter() - self.began, what, pause_s))

    @property
    def pauses(self) -> list[Event]:
        """The events in which a call waited."""
        return [each for each in self.events if each.pause_s]

    @property
    def text(self) -> str:
        """The timeline in lines."""
        head = "in the background" + ("" if self.ended else ", not yet ended")
        return "\n".join([f"  {head}:", *map(_line, self.events)])


def _line(event: Event) -> str:
    pause = f"  (a pause of {event.pause_s:.3f} s)" if event.pause_s else ""
    return f"  {event.at_s:8.1f} s  {event.what}{pause}"
