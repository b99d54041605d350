/* The baseline of vectored_read.py: pieces of another process's memory by process_vm_readv or
 * process_vm_writev, 1024 in a call. Returns 0 or errno. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/uio.h>

int move_pieces(int writes, int pid, char *here, const int64_t *here_at, char *there, const int64_t *there_at,
		int64_t pieces, int64_t size)
{
	struct iovec near[1024], far[1024];
	for (int64_t done = 0; done < pieces;) {
		int64_t n = pieces - done < 1024 ? pieces - done : 1024;
		for (int64_t i = 0; i < n; i++) {
			near[i] = (struct iovec){ here + here_at[done + i], (size_t)size };
			far[i] = (struct iovec){ there + there_at[done + i], (size_t)size };
		}
		ssize_t r = writes ? process_vm_writev(pid, near, (unsigned long)n, far, (unsigned long)n, 0)
				   : process_vm_readv(pid, near, (unsigned long)n, far, (unsigned long)n, 0);
		if (r != n * size)
			return r < 0 ? errno : EIO;
		done += n;
	}
	return 0;
}
