"""Agreement among the ranks that export together, through a store and without any collective.

Rank 0 here is the first of these ranks. It numbers the operations, so that after a failure or a time-out the next
call of every rank lines up again. Within an operation the ranks meet in rounds: every rank reports, rank 0 reads all
reports and writes one verdict, the others read only that. The keys of the store, `i` being an index into the ranks:

    number      the newest operation
    last/<i>    the newest operation that the rank took part in
    beat/<i>    operation, count: changes every second while the rank is in the operation
    failed      operation, report of a rank that failed or died; every rank sees it within a second
    report/<i>  operation, round, what the rank reports
    verdict     operation, the newest round in which all ranks brought values, with these; the error that all raise
    left/<i>    the newest operation of which the rank reads no more keys

Rank 0 leaves after all others, because its process may host the store. Keys are used again: a rank reports when it has
read the verdict of the round before, and rank 0 writes a verdict when all have reported. An error leaves the values of
the round before in place: a rank that is late must not miss that the others went on to a collective. Operations in the
background have all of these keys once more, under a prefix of their own, and are numbered by themselves.
"""

from .fence import Fence
from .operation import Operation

__all__ = ["Fence", "Operation"]
