"""What goes through the two pipes between a process and its worker: lengths, then bytes."""

import json
import struct
from dataclasses import dataclass
from typing import BinaryIO, Self

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Request:
    """A graph, the state of the process that asks, and what differs from the graph's own keyword arguments."""

    graph: bytes
    state: bytes
    rewrites: tuple[str, ...]  # which define operators that the graph calls

    def parts(self) -> tuple[bytes, ...]:
        """Return it as the parts that are sent."""
        return self.graph, self.state, json.dumps(self.rewrites).encode()

    @classmethod
    def of(cls, parts: list[bytes]) -> Self:
        """Return the request that was sent as `parts`."""
        graph, state, rewrites = parts
        return cls(graph, state, tuple(json.loads(rewrites)))


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request: the key in Inductor's cache, or the reason why there is none; and the seconds."""

    key: str = ""
    reason: str = ""
    seconds: float = 0.0

    def parts(self) -> tuple[bytes, ...]:
        """Return it as the parts that are sent."""
        return (json.dumps([self.key, self.reason, self.seconds]).encode(),)

    @classmethod
    def of(cls, parts: list[bytes]) -> Self:
        """Return the reply that was sent as `parts`."""
        return cls(*json.loads(parts[0]))


def send(pipe: BinaryIO, parts: tuple[bytes, ...]) -> None:
    """Write a message."""
    pipe.write(LENGTH.pack(len(parts)))
    for part in parts:
        pipe.write(LENGTH.pack(len(part)))
        pipe.write(part)
    pipe.flush()


def receive(pipe: BinaryIO) -> list[bytes] | None:
    """Read a message; None where the other end is closed, also in the middle of one."""
    count = _number(pipe)
    if count is None:
        return None
    parts = []
    for _ in range(count):
        size = _number(pipe)
        part = pipe.read(size) if size is not None else b""
        if size is None or len(part) < size:
            return None
        parts.append(part)
    return parts


def _number(pipe: BinaryIO) -> int | None:
    data = pipe.read(LENGTH.size)
    return int(LENGTH.unpack(data)[0]) if len(data) == LENGTH.size else None
