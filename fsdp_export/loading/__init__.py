"""Loading, the way back: what of a checkpoint goes where in a module, the memory for it, and the reading."""
