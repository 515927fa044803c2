"""Agreement among the ranks that export together, through a store and without any collective.

Rank 0 here is the first of these ranks. It numbers the operations, so that after a failure or a time-out the next
call of every rank lines up again. Within an operation the ranks meet in rounds: every rank reports, rank 0 reads all
reports and writes one verdict, the others read only that. The keys of the store, `i` being an index into the ranks:

    number               the newest operation
    last/<i>             the newest operation that the rank took part in
    <n>/beat/<i>         changes every second while the rank is in operation n
    <n>/failed           report of a rank that failed or died; every rank sees it within a second
    <n>/<round>/<i>      what the rank reports in this round
    <n>/<round>/verdict  what all ranks brought, or the error that all of them raise
    <n>/verdict          the same error, where a rank finds it whatever its round is
    <n>/left/<i>         the rank reads no more keys of operation n

Rank 0 leaves after all others, because its process may host the store. No name is used twice, and a key is deleted
only when no rank can still look for it. Operations in the background have all of these keys once more, under a prefix
of their own, and are numbered by themselves.
"""

from .fence import Fence
from .operation import Operation

__all__ = ["Fence", "Operation"]
