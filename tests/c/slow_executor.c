/* The peer's process carries our send out, and loses its CPU between the completion and taking the entry
 * out of the queue: there is room for the next one all the same, in a moment. Played by hand on the queue
 * in our own segment, since the moment is a few instructions long. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "layout.h"
#include "pair.h"

static struct end e[2];
static struct sn_qp *qp;

static void find_queue(void)
{
	char path[256];
	const char *base = getenv("ROCECOMM_SOFT_DIR");
	uint32_t n = e[0].qp->qp_num;
	snprintf(path, sizeof(path), "%s/rocecomm-%u/seg-%u", base && *base ? base : "/dev/shm", (unsigned)geteuid(), n >> SN_SLOT_BITS);
	int fd = open(path, O_RDWR);
	CHECK(fd >= 0);
	void *seg = mmap(NULL, SN_SEG_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(seg != MAP_FAILED);
	close(fd);
	qp = sn_qp_at(seg, n & (SN_QPS - 1));
	CHECK(qp->qpn == n);
}

static void *go_on(void *arg)
{
	(void)arg;
	usleep(50000);
	CHECK(post_recv(&e[1], 0, 0, 64) == 0); /* the entry at the head goes, and leaves the queue */
	return NULL;
}

int main(void)
{
	struct options o = usual;
	pthread_t thread;
	o.depth = 4;
	pair_open(e, &o);
	find_queue();
	/* the first without a completion: it leaves no trace but its place in the queue, as one that was polled */
	struct ibv_sge s = sge_of(&e[0], 0, 8);
	struct ibv_send_wr quiet = { .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	CHECK(ibv_post_send(e[0].qp, &quiet, &bad) == 0);
	for (unsigned i = 1; i < 4; i++)
		CHECK(post(&e[0], IBV_WR_SEND, i, 0, 8, NULL, 0) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 4, 0, 8, NULL, 0) == ENOMEM); /* full */
	atomic_store(&qp->sq.completing, atomic_load(&qp->sq.head) + 1);
	CHECK(pthread_create(&thread, NULL, go_on, NULL) == 0);
	CHECK(post(&e[0], IBV_WR_SEND, 4, 0, 8, NULL, 0) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	for (unsigned i = 1; i < 4; i++)
		CHECK(post_recv(&e[1], i, 0, 64) == 0);
	CHECK(post_recv(&e[1], 4, 0, 64) == ENOMEM);
	for (unsigned i = 0; i < 4; i++)
		expect(&e[1], i, IBV_WC_SUCCESS);
	CHECK(post_recv(&e[1], 4, 0, 64) == 0);
	expect(&e[1], 4, IBV_WC_SUCCESS);
	for (unsigned i = 1; i < 5; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	atomic_store(&qp->sq.completing, 0);
	pair_close(e);
	return 0;
}
