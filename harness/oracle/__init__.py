"""Our own executor of ONNX graphs in numpy, independent of every runtime under test."""
