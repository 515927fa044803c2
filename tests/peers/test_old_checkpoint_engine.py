"""The same with a worker that ends an update in the old way, and answers nothing when it fails."""

from peers.test_checkpoint_engine import *  # noqa: F403  collected here too
