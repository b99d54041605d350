/* The least that the system can do: pieces of another process's memory, 1024 a call. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { PIECES = 1024 };

/* Reads (or writes) n pieces of `length` bytes between `local` and process `pid`'s memory at `remote`;
 * returns the bytes moved. */
int64_t pieces(int write, pid_t pid, uint64_t local, uint64_t remote, const int64_t *local_offsets,
               const int64_t *remote_offsets, int64_t length, int64_t n)
{
    struct iovec mine[PIECES], theirs[PIECES];
    int64_t moved = 0;

    for (int64_t first = 0; first < n; first += PIECES) {
        int64_t count = n - first < PIECES ? n - first : PIECES;
        for (int64_t i = 0; i < count; i++) {
            mine[i] = (struct iovec) { (void *)(local + local_offsets[first + i]), length };
            theirs[i] = (struct iovec) { (void *)(remote + remote_offsets[first + i]), length };
        }
        ssize_t got = write ? process_vm_writev(pid, mine, count, theirs, count, 0)
                            : process_vm_readv(pid, mine, count, theirs, count, 0);
        if (got < 0)
            return -1;
        moved += got;
    }
    return moved;
}
