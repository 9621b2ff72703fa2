"""One naive reference per op: plain formulas in f64, gradients by torch.autograd. Slow, and meant to be obvious."""
