"""OpenVINO, for inference on a CPU."""
