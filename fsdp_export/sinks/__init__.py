"""Where tensors go to: files, or a running engine."""
