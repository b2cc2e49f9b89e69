"""The study of audits: its models, what it plants, and its page."""

import torch

from backend_kwargs.fleet.audit import Against, Finding
from backend_kwargs.interval import Interval
from benchmarks.studies.audit import models, page, planted

WHERE = {"device_name": "a CPU", "torch": "2.13.0"}


def finding(verdict, noise):
    against = (Against(name="default", ratio=Interval(1.06, 1.05, 1.07), p=0.001),)
    band = Interval(1.0, 1 / noise, noise)
    return Finding(verdict=verdict, model="mlp", key="k", against=against, noise=band, p=0.002)


def test_the_bar_is_for_quiet_timings():
    """A loser that noise hides does not miss the bar, one that a quiet audit overlooks does."""
    lines = [*page([finding("lost", 1.01), finding("within noise", 1.2)], [[finding("right", 1.01)]] * 2, WHERE)]
    assert "- Planted losers found, where the A/A band is under 2%: 1 of 1, **met**." in lines
    assert "- Of all planted losers, 1 of 2 are found." in lines
    assert "- Audits of 1 unchanged decisions with an alarm: 0 of 2, **met**." in lines
    (line,) = [line for line in page([finding("within noise", 1.01)], [], WHERE) if "losers found" in line]
    assert line.endswith("0 of 1, **missed**.")


def test_nothing_quiet_is_no_success():
    """Without a quiet audit, nothing is said to be met."""
    lines = [*page([finding("lost", 1.2)], [], WHERE)]
    assert sum(line.endswith("**not measured**.") for line in lines) == 2


def test_audits_that_measured_nothing_are_no_success():
    """Where nothing was audited there is no alarm, and the page says so."""
    lines = [*page([finding("lost", 1.01)], [[finding("not audited", 1.01)]] * 2, WHERE)]
    assert "- Audits of 1 unchanged decisions with an alarm: 0 of 2, **not measured**." in lines
    assert "- 2 of them did not measure each decision." in lines


def test_the_planted_kernel_waits_before_the_first_output():
    """The loser's results are default's."""
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    planted(graph)
    x = torch.ones(2)
    (late,) = torch.fx.GraphModule({}, graph)(x)
    assert torch.equal(late, x)


def test_there_are_twenty_models():
    """Each is made anew, and runs."""
    made = models()
    assert len(made) == 20
    model, x = made["norms 128"]()
    assert model(x).shape == x.shape
