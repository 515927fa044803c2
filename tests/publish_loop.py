"""Publishes two checkpoints in turn into one folder until it is killed: FOLDER CHECKPOINT CHECKPOINT."""

import itertools
import shutil
import sys
from pathlib import Path

from fsdp_export.publish import Publication

folder, *checkpoints = map(Path, sys.argv[1:])
for checkpoint in itertools.cycle(checkpoints):
    publication = Publication.begin(folder)
    files = [path.name for path in checkpoint.iterdir()]
    for name in files:
        shutil.copyfile(checkpoint / name, publication.staging / name)
    publication.publish(files)
    print("published", flush=True)
