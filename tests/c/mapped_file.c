/* A file that the program maps itself, shared, and registers: peers map it too after a few uses. What
 * is written shows up in the file; once it is deregistered no peer and no descriptor keeps it. */
#include <fcntl.h>
#include <sys/mman.h>

#include "process.h"

#define LEN (256u << 10)
#define ROUNDS 8

static int mapped_files(void)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];
	int n = 0;
	while (fgets(line, sizeof(line), f))
		n += strstr(line, "rocecomm-test-") != NULL;
	fclose(f);
	return n;
}

static void peer(struct end *e, struct hello you, int in, int out)
{
	char path[64], c;
	(void)you;
	void *where = mmap(NULL, LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(where != MAP_FAILED);
	for (int how = 0; how < 3; how++) {
		/* a named file, one whose name is gone, and the same address with another file behind it */
		snprintf(path, sizeof(path), "/dev/shm/rocecomm-test-%d", (int)getpid());
		int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
		CHECK(fd >= 0 && ftruncate(fd, 2 * LEN) == 0);
		char *at = mmap(where, LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, LEN);
		CHECK(at != MAP_FAILED);
		if (how == 1)
			unlink(path);
		int fds = count_fds();
		struct ibv_mr *mr = ibv_reg_mr(e->pd, at + 100, LEN - 100, ALL_ACCESS);
		CHECK(mr);
		struct hello h = { 0, mr->rkey, (uintptr_t)at + 100 };
		put(out, &h, sizeof(h));
		for (int round = 0; round < ROUNDS; round++) {
			char *copy = malloc(LEN);
			take(in, &c, 1);
			CHECK(same(at + 100, LEN - 200, (unsigned)(round + how)));
			CHECK(pread(fd, copy, LEN, LEN) == (ssize_t)LEN);
			CHECK(same(copy + 100, LEN - 200, (unsigned)(round + how)));
			free(copy);
			CHECK(*(_Atomic uint64_t *)(void *)(at + LEN - 8) == (uint64_t)round + 1);
			put(out, &c, 1);
		}
		CHECK(ibv_dereg_mr(mr) == 0);
		CHECK(count_fds() == fds);
		CHECK(munmap(at, LEN) == 0);
		close(fd);
		unlink(path);
	}
}

int main(void)
{
	struct end e;
	int in, out;
	char c = 0;
	pid_t pid = start_peer(&usual, peer, &in, &out);
	end_open(&e, &usual);
	meet(&e, &usual, in, out);
	for (int how = 0; how < 3; how++) {
		struct hello h;
		take(in, &h, sizeof(h));
		struct end far = { .buf = (char *)(uintptr_t)h.addr, .mr = &(struct ibv_mr){ .rkey = h.rkey } };
		for (int round = 0; round < ROUNDS; round++) {
			pattern(e.buf, LEN - 200, (unsigned)(round + how));
			CHECK(post(&e, IBV_WR_RDMA_WRITE, 1, 0, LEN - 200, &far, 0) == 0);
			expect(&e, 1, IBV_WC_SUCCESS);
			memset(e.buf, 0, LEN);
			CHECK(post(&e, IBV_WR_RDMA_READ, 2, 0, LEN - 200, &far, 0) == 0);
			expect(&e, 2, IBV_WC_SUCCESS);
			CHECK(same(e.buf, LEN - 200, (unsigned)(round + how)));
			struct ibv_sge s = sge_of(&e, 0, 8);
			struct ibv_send_wr wr = { .wr_id = 3, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
						  .send_flags = IBV_SEND_SIGNALED }, *bad;
			wr.wr.atomic.remote_addr = h.addr + LEN - 108;
			wr.wr.atomic.rkey = h.rkey;
			wr.wr.atomic.compare_add = 1;
			CHECK(ibv_post_send(e.qp, &wr, &bad) == 0);
			expect(&e, 3, IBV_WC_SUCCESS);
			put(out, &c, 1);
			take(in, &c, 1);
		}
		CHECK(how == 1 || mapped_files() == 1); /* without its name it takes privileges */
	}
	join_peer(pid);
	/* nothing of the peer's files is mapped here any more, but for the last one that was in use */
	CHECK(mapped_files() <= 1);
	end_close(&e);
	return 0;
}
