"""Differential testing of ONNX language models: candidate engines against a trustworthy oracle."""
