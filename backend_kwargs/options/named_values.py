"""The lookup of named values: built in, registered in this process, or offered by an installed package.

Only the entry point with the requested name is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from backend_kwargs.errors import BackendKwargsError, BrokenPluginError, error_text, unknown, wrong_value
from backend_kwargs.options.option import check_name

T = TypeVar("T")


@dataclass(frozen=True)
class NamedValues(Generic[T]):
    """Values of one kind, such as templates.

    `read` converts the object of an entry point of `group`, or returns None if it is not what is `wanted`. `advice`
    returns the next step for a name that is close to no other.
    """

    kind: str
    group: str
    built_in: Mapping[str, T]
    read: Callable[[EntryPoint, object], T | None]
    wanted: str
    advice: Callable[[list[str]], str]
    registered: dict[str, T] = field(default_factory=dict)

    def find(self, name: str) -> T:
        """Return the value called `name`, or raise with the nearest name."""
        if self.is_known(name):
            return self.built_in[name] if name in self.built_in else self.registered[name]
        for entry in entry_points(group=self.group, name=name):
            return self._loaded(entry)
        raise unknown(self.kind, name, self.names(), otherwise=self.advice(self.names()))

    def names(self) -> list[str]:
        """Return the names of all values."""
        plugged_in = (entry.name for entry in entry_points(group=self.group))
        return list(dict.fromkeys((*self.built_in, *self.registered, *plugged_in)))

    def is_known(self, name: str) -> bool:
        """Return whether `name` is built in or registered, so that no entry point is needed."""
        return name in self.built_in or name in self.registered

    def register(self, values: Mapping[str, T], equal: Callable[[T, T], bool], other: str) -> None:
        """Register all or none; the same value may be registered again, another one under a used name raises."""
        for name, value in values.items():
            check_name(f"A {self.kind}", name)
            if self.is_known(name) and not equal(self.find(name), value):
                raise BackendKwargsError(f"{self.kind.capitalize()} {name!r} {other}; choose another name.")
        self.registered.update({name: value for name, value in values.items() if not self.is_known(name)})

    def _loaded(self, entry: EntryPoint) -> T:
        try:
            loaded = entry.load()
        except Exception as error:  # a plug-in may fail in any way, and must not break the others
            what = f"{self.kind.capitalize()} {entry.name!r} of {entry.value!r}"
            raise BrokenPluginError(f"{what} does not load: {error_text(error)}.") from error
        value = self.read(entry, loaded)
        if value is None:
            raise wrong_value(f"Entry point {entry.value!r}", self.wanted, loaded)
        return value
