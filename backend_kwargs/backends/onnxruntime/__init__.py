"""ONNX Runtime, for inference on a CPU."""
