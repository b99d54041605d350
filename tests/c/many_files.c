/* More registered files than peers can map: the rest goes the other way, and no descriptor stays behind. */
#include <fcntl.h>
#include <sys/mman.h>

#include "pair.h"

#define FILES 300 /* more than a context has places for */

int main(void)
{
	struct end e;
	struct ibv_mr *mr[FILES];
	char *at[FILES], path[64];

	end_open(&e, &usual);
	int fds = count_fds();
	for (int i = 0; i < FILES; i++) {
		snprintf(path, sizeof(path), "/dev/shm/rocecomm-test-%d-%d", (int)getpid(), i);
		int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
		CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
		at[i] = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(at[i] != MAP_FAILED);
		CHECK(mr[i] = ibv_reg_mr(e.pd, at[i], 4096, ALL_ACCESS));
		close(fd);
		unlink(path);
	}
	for (int i = 0; i < FILES; i++)
		CHECK(ibv_dereg_mr(mr[i]) == 0 && munmap(at[i], 4096) == 0);
	CHECK(count_fds() == fds);
	end_close(&e);
	return 0;
}
