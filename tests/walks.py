"""Count the own functions and files that an option, a race and a bundle go through: `python -m tests.walks [NAME]`.

Each case is warmed up once, so that what is imported or cached for the whole process does not count. With a name, what
that walk runs is listed by file.
"""

import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import backend_kwargs as bk

OWN = Path(bk.__file__).parent
UNNAMED = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Net(torch.nn.Module):
    """A small module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self.linear(x).relu()


def option(folder: Path) -> None:
    """Compile with one option of Inductor."""
    torch.compile(Net(), backend="tmpl-inductor", options={"epilogue_fusion": False})(torch.ones(2, 8))


def race(folder: Path) -> None:
    """Race default against one candidate."""
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["no_size_asserts"], race="always", store=str(folder))
    torch.compile(Net(), backend=backend)(torch.ones(2, 8))


def bundle(folder: Path) -> None:
    """Build a bundle, save it, load it and call it."""
    built = bk.CompiledModule(bk.CompileConfig()).build(Net(), [torch.ones(2, 8)])
    built.save(folder / "bundle")
    loaded = bk.CompiledModule.load(folder / "bundle", Net(), trust=True)
    loaded.activate()
    loaded(torch.ones(2, 8))


WALKS = {each.__name__: each for each in (option, race, bundle)}


def walked(call: Callable[[Path], None]) -> dict[str, set[str]]:
    """Return the named functions of each own file that a call runs, in any thread."""
    found: defaultdict[str, set[str]] = defaultdict(set)

    def note(frame: object, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(OWN)) and code.co_name not in UNNAMED:
            found[str(Path(code.co_filename).relative_to(OWN))].add(code.co_qualname)

    for profile in (None, note):
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            threading.setprofile(profile)
            sys.setprofile(profile)
            try:
                call(Path(folder))
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return found


def lines(names: list[str]) -> Iterator[str]:
    """Yield the counts of each walk; of those that are named also their functions, by file."""
    for name in names or WALKS:
        files = walked(WALKS[name])
        yield f"{name}: {sum(map(len, files.values()))} functions in {len(files)} files"
        yield from (f"  {file}: {', '.join(sorted(files[file]))}" for file in sorted(files) if names)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines(sys.argv[1:]))
