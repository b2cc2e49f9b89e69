"""The exporter to ONNX: which operators it translates, and a graph of such operators translated."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx._internal.exporter._registration import ONNXRegistry

REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"  # logs if torchvision is not installed


def translated_operators() -> "ONNXRegistry":
    """Return the exporter's registry, whose `is_registered` says whether it translates an operator."""
    from torch.onnx import _constants
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return ONNXRegistry.from_torchlib(_constants.ONNX_DEFAULT_OPSET)


def translated(program: "ExportedProgram", registry: "ONNXRegistry") -> Any:
    """Return a program of registered operators as an `onnx_ir.Model`, as `torch.onnx.export` would translate it.

    That takes a second or two for any program: it builds a registry, and decomposes what is registered already.
    """
    import torch.fx.experimental._config as fx_config
    from onnxscript.version_converter import convert_version
    from torch.onnx._internal.exporter import _core, _fx_passes

    with fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined] # as the exporter does
        _fx_passes.insert_type_promotion_nodes(program.graph_module)
    for node in program.graph.nodes:
        node.meta.setdefault("nn_module_stack", {})  # or it warns of each node
    model = _core._exported_program_to_onnx_program(program, registry=registry).model
    convert_version(model, registry.opset_version, fallback=True)
    return model
