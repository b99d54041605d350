/* Two threads, one at each end, sending both ways at once with late receives: for the thread
 * sanitizer, which sees the shared protocol only where both ends are of one process. */
#include <pthread.h>

#include "pair.h"

#define MESSAGES 3000

static void *talk(void *arg)
{
	struct end *e = arg;
	uint64_t sent = 0, done = 0, posted = 0, got = 0;
	double until = seconds() + 25;
	while (done < MESSAGES || got < MESSAGES) {
		CHECK(seconds() < until);
		if (posted < MESSAGES && posted - got < 16) {
			CHECK(post_recv(e, posted, 65536 + (posted % 16) * 1024, 1024) == 0);
			posted++;
		}
		if (sent < MESSAGES && sent - done < 16) {
			size_t at = (sent % 16) * 1024, len = sent % 3 ? 16 : 900;
			pattern(e->buf + at, len, (unsigned)sent);
			CHECK(post(e, IBV_WR_SEND, sent, at, len, NULL, 0) == 0);
			sent++;
		}
		struct ibv_wc wc;
		int n = ibv_poll_cq(e->cq, 1, &wc);
		CHECK(n >= 0);
		if (!n)
			continue;
		CHECK(wc.status == IBV_WC_SUCCESS);
		if (wc.opcode & IBV_WC_RECV) {
			CHECK(wc.wr_id == got);
			CHECK(same(e->buf + 65536 + (got % 16) * 1024, got % 3 ? 16 : 900, (unsigned)got));
			got++;
		} else {
			CHECK(wc.wr_id == done);
			done++;
		}
	}
	return NULL;
}

int main(void)
{
	struct end e[2];
	pthread_t t[2];
	pair_open(e, &usual);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&t[i], NULL, talk, &e[i]) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	pair_close(e);
	return 0;
}
