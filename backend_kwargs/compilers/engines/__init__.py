"""Inference engines: ONNX Runtime and OpenVINO compile parts of a graph, with its parameters as constants."""
