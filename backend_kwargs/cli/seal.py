"""`backend-kwargs seal`: what to declare to `seal`, from a log of the sizes that a service saw."""

from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.cli.arguments import AsJson
from backend_kwargs.cli.console import print_json, print_table, say
from backend_kwargs.sealing.size_log import FEW, LINE, pasted, propose, read_log


def show(
    from_log: Annotated[
        Path, typer.Option("--from-log", metavar="FILE", help=f"JSON lines, one for each call: {LINE}")
    ],
    most: Annotated[int, typer.Option(min=1, max=64, help="Sizes or buckets of each name.")] = FEW,
    json: AsJson = False,
) -> None:
    """Propose what to declare to `seal`: exact sizes, or buckets, and what each of them costs."""
    proposals = propose(read_log(from_log), most)
    line = f"bk.seal(compiled, example_inputs, dims=..., {pasted(proposals)})"
    if json:
        fields = [
            {
                "name": each.name,
                "sizes": each.sizes,
                "calls": each.calls,
                "added": each.added,
                "buckets": [vars(bucket) for bucket in each.buckets],
            }
            for each in proposals
        ]
        return print_json({"proposals": fields, "line": line})
    for each in proposals:
        kind = "each has its own code" if each.exact else f"padding adds {each.added:.0%} to what is computed"
        say(f"{each.name}: {each.sizes} sizes in {each.calls} calls; {kind}")
        rows = [
            (str(bucket.size), str(bucket.calls), f"{bucket.calls / each.calls:.1%}", f"{bucket.added:+.0%}")
            for bucket in each.buckets
        ]
        print_table(("size", "calls", "of all", "padding"), rows)
    if any(not each.exact for each in proposals):
        say("Where padding changes the model's results, declare a range, such as sizes={'sequence': range(1, 513)}.")
    say("", line)
