/* A sender dies between the completion that it pushes and the event that announces it, at the very
 * instruction: whoever sleeps on the channel wakes up and finds the completion. */
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/ptrace.h>

#include "process.h"
#include "softnic.h"

static _Atomic int *go;

static void peer(struct end *e, struct hello you, int in, int out)
{
	(void)you;
	(void)in;
	put(out, "r", 1);
	while (!atomic_load(go))
		;
	post(e, IBV_WR_SEND, 1, 0, 8, NULL, 0);
	for (;;)
		pause();
}

int main(void)
{
	go = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(go != MAP_FAILED);
	for (int round = 0; round < 2; round++) {
		struct options o = usual;
		struct end e;
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;
		int in, out, status, steps = 0;
		char c;
		o.channel = 1;
		atomic_store(go, 0);
		pid_t pid = start_peer(&o, peer, &in, &out);
		end_open(&e, &o);
		meet(&e, &o, in, out);
		CHECK(post_recv(&e, 7, 0, 64) == 0);
		CHECK(ibv_req_notify_cq(e.cq, 0) == 0);
		CHECK(ibv_poll_cq(e.cq, 1, &wc) == 0);
		take(in, &c, 1);
		struct sn_cq *shared = sn_container(e.cq, struct sn_priv_cq, ibv)->cq;
		struct sn_cqe *ring = sn_at(sn_ctx_of(e.ctx)->seg, shared->ring);
		CHECK(atomic_load(&shared->armed) == SN_ARM_NEXT);
		if (ptrace(PTRACE_SEIZE, pid, 0, 0) || ptrace(PTRACE_INTERRUPT, pid, 0, 0)) {
			kill(pid, SIGKILL);
			puts("ptrace is not permitted here");
			return 77;
		}
		CHECK(waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status));
		atomic_store(go, 1);
		while (round == 0 ? atomic_load(&shared->armed) != SN_ARM_NONE : atomic_load(&ring[0].seq) != 1) {
			CHECK(steps++ < 200000);
			CHECK(ptrace(PTRACE_SINGLESTEP, pid, 0, 0) == 0);
			CHECK(waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status));
		}
		CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, __WALL) == pid);
		alarm(10);
		CHECK(ibv_get_cq_event(e.channel, &cq, &context) == 0 && cq == e.cq);
		alarm(0);
		ibv_ack_cq_events(cq, 1);
		expect(&e, 7, IBV_WC_SUCCESS);
		close(in);
		close(out);
		end_close(&e);
	}
	return 0;
}
