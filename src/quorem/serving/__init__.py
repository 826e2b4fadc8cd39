"""After training: loading, inspecting, scoring, and exporting to ONNX and ``torch.export``."""
