"""From the names a source uses to the names a checkpoint uses."""
