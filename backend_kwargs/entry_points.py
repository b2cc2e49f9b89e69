"""What dynamo's entry points name: one attribute for each backend and template, each made when it is asked for."""

from backend_kwargs.backend import Backend
from backend_kwargs.registry import PLAIN, make_backend
from backend_kwargs.templates import BUILT_IN

SPECS = {
    spec.replace("-", "_"): spec
    for spec in (PLAIN, "tmpl-tvm", "tmpl-openvino", "tmpl-openvino-native", "tmpl-onnxruntime", "tmpl-tensorrt")
}
SPECS |= {name: f"{PLAIN}:{name}" for name in BUILT_IN}


def __getattr__(name: str) -> Backend:
    if name not in SPECS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not registered here: dynamo registers what it looked up, and asserts that the name is new.
    return make_backend(SPECS[name])
