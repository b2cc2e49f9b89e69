"""OpenTelemetry's metrics of sealed functions."""

import json

import pytest

from tests import forks

pytest.importorskip("opentelemetry.sdk.metrics", reason="no opentelemetry-sdk")

OBSERVED = """
import json, torch
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
import backend_kwargs as bk

def sin(x):
    return x.sin()

def seal():
    torch._dynamo.reset()
    return bk.seal(torch.compile(sin, backend="eager"), torch.ones(3))

first = seal()
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))  # later than the first, as some services do
second = seal()
for size in (3, 3, 4):
    second(torch.ones(size))
found = {}
for each in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
    for point in each.data.data_points:
        found[f"{each.name} {dict(point.attributes)}"] = point.value
print(json.dumps(found))
"""


def test_counters_are_metrics():
    """Calls by outcome and misses by reason are observed, by the function's name."""
    ran = forks.run("-c", OBSERVED)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["backend_kwargs.sealed.calls {'function': 'sin', 'outcome': 'compiled'}"] == 2
    assert found["backend_kwargs.sealed.calls {'function': 'sin', 'outcome': 'missed'}"] == 1
    reasons = [name for name in found if name.startswith("backend_kwargs.sealed.misses")]
    assert len(reasons) == 1
    assert "size mismatch at index 0. expected 3, actual 4" in reasons[0]
    assert "already been created" not in ran.stderr
