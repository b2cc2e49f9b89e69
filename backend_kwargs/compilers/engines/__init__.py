"""Engines for inference: ONNX Runtime and OpenVINO, given parts of a graph with its parameters as constants."""
