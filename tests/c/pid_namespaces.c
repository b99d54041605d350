/* A peer in another pid namespace, as in a container that shares /dev/shm: neither sees the other's
 * pid, yet both know that the other lives, bytes travel both ways, and its death is an error soon. */
#include <fcntl.h>
#include <sched.h>

#include "process.h"

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	char c;
	CHECK(getpid() == 1);
	CHECK(post_recv(e, 1, 0, 200000) == 0);
	put(out, "r", 1);
	expect(e, 1, IBV_WC_SUCCESS);
	CHECK(same(e->buf, 200000, 3));
	CHECK(post(e, IBV_WR_RDMA_READ, 2, 300000, 200000, &far, 0) == 0);
	expect(e, 2, IBV_WC_SUCCESS);
	CHECK(same(e->buf + 300000, 200000, 3));
	put(out, "d", 1);
	take(in, &c, 1); /* until killed */
}

int main(void)
{
	struct end e;
	int in, out, status;
	char c;
#ifdef __SANITIZE_THREAD__
	puts("the thread sanitizer does not see what orders two processes");
	return 77;
#endif
	int ours = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
	if (ours < 0 || unshare(CLONE_NEWPID)) {
		puts("a pid namespace is not permitted here");
		return 77;
	}
	setenv("ROCECOMM_SOFT_STAGING", "", 1);
	pid_t pid = start_peer(&usual, peer, &in, &out);
	CHECK(setns(ours, CLONE_NEWPID) == 0); /* with children elsewhere there could be no thread here */
	end_open(&e, &usual);
	struct hello you = meet(&e, &usual, in, out);
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	take(in, &c, 1);
	pattern(e.buf, 200000, 3);
	CHECK(post(&e, IBV_WR_SEND, 1, 0, 200000, NULL, 0) == 0);
	expect(&e, 1, IBV_WC_SUCCESS);
	take(in, &c, 1);
	CHECK(post_atomic(&e, IBV_WR_ATOMIC_FETCH_AND_ADD, 2, 500000, &far, 600000, 5, 0) == 0);
	expect(&e, 2, IBV_WC_SUCCESS);
	CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
	CHECK(post(&e, IBV_WR_RDMA_WRITE, 3, 0, 200000, &far, 0) == 0);
	expect(&e, 3, IBV_WC_RETRY_EXC_ERR);
	end_close(&e);
	return 0;
}
