/* Staging: either end is killed or stopped in the middle of a transfer. The other gets its error soon,
 * and what a dead executor had asked for does not touch memory that was given back. Others go on. */
#include "process.h"

enum { LEN = 8 << 20 };

/* Writes into the other end for ever. */
static void writer(struct end *e, struct hello you, int in, int out)
{
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	struct ibv_wc wc;
	(void)in;
	memset(e->buf, 0x55, e->len);
	put(out, "g", 1);
	for (;;) {
		if (post(e, IBV_WR_RDMA_WRITE, 2, 0, e->len, &far, 0))
			usleep(1000);
		if (ibv_poll_cq(e->cq, 1, &wc) > 0 && wc.status != IBV_WC_SUCCESS)
			pause();
	}
}

static void target(struct end *e, struct hello you, int in, int out)
{
	(void)e;
	(void)you;
	(void)in;
	put(out, "g", 1);
	pause();
}

static void executor_dies(const struct options *o, int stop)
{
	for (int round = 0; round < 12; round++) {
		struct end e;
		int in, out, status;
		char c;
		pid_t pid = start_peer(o, writer, &in, &out);
		end_open(&e, o);
		meet(&e, o, in, out);
		take(in, &c, 1);
		usleep((useconds_t)(3000 + 900 * round));
		CHECK(kill(pid, stop ? SIGSTOP : SIGKILL) == 0);
		CHECK(waitpid(pid, &status, stop ? WUNTRACED : 0) == pid);
		int err = ibv_dereg_mr(e.mr);
		CHECK(err == 0 || (stop && err == EBUSY)); /* a stopped one holds its claim */
		if (err)
			kill(pid, SIGCONT);
		for (int i = 0; err && i < 200; i++) {
			usleep(10000);
			err = ibv_dereg_mr(e.mr);
		}
		CHECK(err == 0);
		memset(e.buf, 0x11, e.len);
		usleep(20000);
		for (size_t i = 0; i < e.len; i++)
			CHECK(e.buf[i] == 0x11);
		kill(pid, SIGKILL);
		if (stop)
			CHECK(waitpid(pid, &status, 0) == pid);
		close(in);
		close(out);
		e.mr = NULL;
		end_close(&e);
		if (stop && round == 1)
			break;
	}
}

static void target_goes(const struct options *o, int signal)
{
	for (int round = 0; round < (signal == SIGKILL ? 10 : 1); round++) {
		struct end e;
		int in, out, status, killed = 0;
		char c;
		pid_t pid = start_peer(o, target, &in, &out);
		end_open(&e, o);
		struct hello you = meet(&e, o, in, out);
		struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
		take(in, &c, 1);
		pid_t killer = fork();
		CHECK(killer >= 0);
		if (killer == 0) {
			usleep((useconds_t)(2000 + 700 * round));
			kill(pid, signal);
			_exit(0);
		}
		for (double start = seconds();;) {
			CHECK(seconds() - start < 8);
			CHECK(post(&e, IBV_WR_RDMA_READ, 2, 0, e.len, &far, 0) == 0);
			struct ibv_wc wc = wait_wc(&e);
			if (wc.status == IBV_WC_SUCCESS)
				continue;
			killed = wc.status;
			break;
		}
		CHECK(killed == IBV_WC_RETRY_EXC_ERR);
		CHECK(waitpid(killer, &status, 0) == killer);
		kill(pid, SIGKILL);
		CHECK(waitpid(pid, &status, 0) == pid);
		close(in);
		close(out);
		end_close(&e);
	}
}

int main(void)
{
#ifdef __SANITIZE_THREAD__
	puts("the thread sanitizer does not see what orders two processes");
	return 77;
#endif
	struct options o = usual;
	setenv("ROCECOMM_SOFT_STAGING", "1", 1);
	o.len = LEN;
	executor_dies(&o, 0);
	target_goes(&o, SIGKILL);
	executor_dies(&o, 1);
	target_goes(&o, SIGSTOP);
	return 0;
}
