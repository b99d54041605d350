/* A peer in a process of its own: it runs `body` on its end, connected to ours through a pipe pair. */
#ifndef PROCESS_H
#define PROCESS_H

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>

#include "pair.h"

struct hello {
	uint32_t qpn, rkey;
	uint64_t addr;
};

static inline void put(int fd, const void *p, size_t n)
{
	CHECK(write(fd, p, n) == (ssize_t)n);
}

static inline void take(int fd, void *p, size_t n)
{
	CHECK(read(fd, p, n) == (ssize_t)n);
}

static inline struct hello meet(struct end *e, const struct options *o, int in, int out)
{
	struct hello me = { e->qp->qp_num, e->mr->rkey, (uintptr_t)e->buf }, you;
	char c = 0;
	put(out, &me, sizeof(me));
	take(in, &you, sizeof(you));
	CHECK(to_rts(e, you.qpn, o) == 0);
	put(out, &c, 1);
	take(in, &c, 1);
	return you;
}

/* Forks before any device is open; returns the child's pid, in the child never. */
static inline pid_t start_peer(const struct options *o, void (*body)(struct end *, struct hello, int in, int out), int *in,
			       int *out)
{
	int down[2], up[2];
	CHECK(pipe(down) == 0 && pipe(up) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		struct end e;
		close(down[1]);
		close(up[0]);
		alarm(25);
		end_open(&e, o);
		struct hello you = meet(&e, o, down[0], up[1]);
		body(&e, you, down[0], up[1]);
		end_close(&e);
		_exit(0);
	}
	close(down[0]);
	close(up[1]);
	*in = up[0];
	*out = down[1];
	return pid;
}

static inline void join_peer(pid_t pid)
{
	int status;
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
