"""Where tensors come from: a live module, or a checkpoint on disk."""
