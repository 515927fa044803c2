"""What carries tensors to engines: buckets of bytes, and the wires they go over. No engine is known here."""
