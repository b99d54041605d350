/* A file that the program maps and registers stays the program's: its record locks survive the
 * registration, and where a part of it was replaced by other memory, what arrives is in that memory. */
#include <fcntl.h>
#include <sys/mman.h>

#include "process.h"

#define LEN (64u << 10)

static int locked_by_parent(const char *path)
{
	struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1 };
	int fd, status;
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		fd = open(path, O_RDWR);
		_exit(fd < 0 || fcntl(fd, F_GETLK, &l) ? 2 : l.l_type != F_UNLCK);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) < 2);
	return WEXITSTATUS(status);
}

static void peer(struct end *e, struct hello you, int in, int out)
{
	char path[64], c;
	struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1 };
	(void)you;
	snprintf(path, sizeof(path), "/dev/shm/rocecomm-test-%d", (int)getpid());
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(fd >= 0 && ftruncate(fd, LEN) == 0);
	CHECK(fcntl(fd, F_SETLK, &l) == 0);
	char *at = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(at != MAP_FAILED);
	struct ibv_mr *mr = ibv_reg_mr(e->pd, at, LEN, ALL_ACCESS);
	CHECK(mr && locked_by_parent(path));
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(locked_by_parent(path));

	/* the second half is ordinary memory by now, though a registration of the whole file stands */
	CHECK(mr = ibv_reg_mr(e->pd, at, LEN, ALL_ACCESS));
	CHECK(mmap(at + LEN / 2, LEN / 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + LEN / 2);
	struct ibv_mr *again = ibv_reg_mr(e->pd, at, LEN, ALL_ACCESS);
	CHECK(again);
	struct hello h = { 0, again->rkey, (uintptr_t)at };
	put(out, &h, sizeof(h));
	take(in, &c, 1);
	CHECK(same(at, LEN, 4));
	CHECK(ibv_dereg_mr(again) == 0 && ibv_dereg_mr(mr) == 0);
	CHECK(munmap(at, LEN) == 0);
	close(fd);
	unlink(path);
}

int main(void)
{
	struct end e;
	struct hello h;
	int in, out;
	char c = 0;
	pid_t pid = start_peer(&usual, peer, &in, &out);
	end_open(&e, &usual);
	meet(&e, &usual, in, out);
	take(in, &h, sizeof(h));
	struct end far = { .buf = (char *)(uintptr_t)h.addr, .mr = &(struct ibv_mr){ .rkey = h.rkey } };
	for (int i = 0; i < 5; i++) { /* a file is mapped from its third use on */
		pattern(e.buf, LEN, (unsigned)i);
		CHECK(post(&e, IBV_WR_RDMA_WRITE, 1, 0, LEN, &far, 0) == 0);
		expect(&e, 1, IBV_WC_SUCCESS);
	}
	put(out, &c, 1);
	join_peer(pid);
	end_close(&e);
	return 0;
}
