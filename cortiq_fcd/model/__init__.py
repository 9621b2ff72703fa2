"""The network as plain tensors, made of kernels."""
