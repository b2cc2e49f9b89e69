"""The exporter to ONNX: which operators it translates."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"  # logs if torchvision is not installed


def translated_operators() -> "ONNXRegistry":
    """Return the exporter's registry, whose `is_registered` says whether it translates an operator."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return ONNXRegistry.from_torchlib()
