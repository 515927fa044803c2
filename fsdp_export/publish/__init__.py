"""Replace the checkpoint in a folder: a reader finds the old one, the new one or none that loads, never a mixture.

Files are written into a folder inside the folder. The name of that inner folder is the state of the replacement, and
what the next run does with it if the process at work died:

    .fsdp-export-writing    files arrive, the old checkpoint stands                 it is thrown away
    .fsdp-export-retire     committed; the old checkpoint's files are removed       it is carried to its end
    .fsdp-export-install    the old checkpoint is gone, the new files are moved in  it is carried to its end

No file of the new checkpoint ever stands beside one of the old. Files are moved in from what a loader asks for last to
what it asks for first, and removed in the opposite order: an index is there before its shards and until they are gone,
`config.json` is the last in and the first out, and the record of an export never stands beside half of its weights.

The process at work holds an flock on `lock` in the inner folder; it survives the renames and ends with the process.
On a file system without flock (some NFS and Lustre mounts) the process that `lock` names counts as holding it while it
lives, on another host for ever, and runs that begin in the same instant are not kept apart.

For readers that load while the next checkpoint is written, `versions` keeps a folder for each.
"""

from .publication import MARKER, Publication, files_replaced_by, foreign_weights, is_name, recover
from .versions import NewVersion

__all__ = ["MARKER", "NewVersion", "Publication", "files_replaced_by", "foreign_weights", "is_name", "recover"]
