/* A program asleep in ibv_get_cq_event that is stopped and continued (Ctrl-Z, fg; a debugger; a frozen
 * container) sleeps on, as read() from a device does; a handler without SA_RESTART ends the sleep with EINTR. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "process.h"

static void handler(int number)
{
	(void)number;
}

static void peer(struct end *e, struct hello you, int in, int out)
{
	struct ibv_cq *cq;
	void *context;
	struct sigaction action = { .sa_handler = handler };
	(void)you;
	(void)in;
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(post_recv(e, 1, 0, 64) == 0);
	CHECK(ibv_req_notify_cq(e->cq, 0) == 0);
	put(out, "s", 1);
	CHECK(ibv_get_cq_event(e->channel, &cq, &context) == -1 && errno == EINTR); /* SIGUSR1, nothing before */
	put(out, "s", 1);
	CHECK(ibv_get_cq_event(e->channel, &cq, &context) == 0 && cq == e->cq);
	ibv_ack_cq_events(cq, 1);
	expect(e, 1, IBV_WC_SUCCESS);
}

/* Waits until the process is in this state (proc(5)), S: asleep, T: stopped. */
static void until(pid_t pid, char state)
{
	char path[64], line[512], *end;
	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	for (int i = 0; i < 10000; i++) {
		FILE *file = fopen(path, "r");
		CHECK(file && fgets(line, sizeof(line), file));
		fclose(file);
		end = strrchr(line, ')');
		CHECK(end);
		if (end[2] == state)
			return;
		usleep(1000);
	}
	CHECK(!"the process never got into that state");
}

int main(void)
{
	struct options o = usual;
	struct end e;
	int in, out;
	char c;
	o.channel = 1;
	pid_t pid = start_peer(&o, peer, &in, &out);
	end_open(&e, &o);
	meet(&e, &o, in, out);
	for (int i = 0; i < 2; i++) {
		take(in, &c, 1);
		until(pid, 'S');
		CHECK(kill(pid, SIGSTOP) == 0);
		until(pid, 'T');
		CHECK(kill(pid, SIGCONT) == 0);
		until(pid, 'S');
		if (i == 0)
			CHECK(kill(pid, SIGUSR1) == 0);
	}
	CHECK(post(&e, IBV_WR_SEND, 1, 0, 8, NULL, 0) == 0);
	expect(&e, 1, IBV_WC_SUCCESS);
	join_peer(pid);
	end_close(&e);
	return 0;
}
