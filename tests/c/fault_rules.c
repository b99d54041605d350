/* Which requests a rule hits: counts, seeds, operations, queue pairs, contexts; and what is refused. */
#include "fault.h"

static struct options o;
static struct end e[2];

/* Which of n writes are hit, as bits: the fault is a delay so short that all go on. */
static uint64_t hits(uint64_t id, unsigned n)
{
	uint64_t bits = 0, matched, hit, before = 0;
	for (unsigned i = 0; i < n; i++) {
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
		expect(&e[0], i, IBV_WC_SUCCESS);
		CHECK(softnic_inject_stats(id, &matched, &hit) == 0 && matched == i + 1);
		bits |= (hit - before) << i;
		before = hit;
	}
	CHECK(softnic_inject_remove(id) == 0);
	return bits;
}

static void counts_and_seeds(void)
{
	CHECK(hits(inject(NULL, "delay:us=1,after=3,times=2"), 10) == 0x18);
	CHECK(hits(inject(&e[0], "delay:us=1,p=0"), 20) == 0);
	CHECK(hits(inject(&e[0], "delay:us=1,p=1.0"), 20) == 0xfffff);
	uint64_t a = hits(inject(&e[0], "delay:us=1,p=0.3,seed=7"), 60);
	uint64_t b = hits(inject(&e[0], " Delay : us=1 , p=.3 , seed=7 ;"), 60);
	uint64_t c = hits(inject(&e[0], "delay:us=1,p=0.3,seed=8"), 60);
	CHECK(a == b && a != c);
	CHECK(__builtin_popcountll(a) > 8 && __builtin_popcountll(a) < 29); /* of 60 at 0.3 */
	/* the stream is this one on every machine */
	CHECK(a == 0x16031a508400a45ULL);
}

static void of_several_the_first_acts(void)
{
	uint64_t first = inject(&e[0], "delay:us=1,times=1"), second = inject(&e[0], "delay:us=1");
	for (unsigned i = 0; i < 3; i++) {
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
		expect(&e[0], i, IBV_WC_SUCCESS);
	}
	uninject(first, 3, 1);
	uninject(second, 3, 2);
	uint64_t both = inject(&e[0], "delay:us=1,times=1;delay:us=1,times=1");
	for (unsigned i = 0; i < 3; i++) {
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, i, 0, 8, &e[1], 0) == 0);
		expect(&e[0], i, IBV_WC_SUCCESS);
	}
	uninject(both, 6, 2);
}

static void filters(void)
{
	char rule[64];
	uint64_t id = inject(NULL, "delay:us=1,op=rdma_read+atomic"), matched, hit;
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_READ, 2, 0, 8, &e[1], 0) == 0);
	CHECK(post_atomic(&e[0], IBV_WR_ATOMIC_FETCH_AND_ADD, 3, 0, &e[1], 0, 1, 0) == 0);
	for (unsigned i = 1; i < 4; i++)
		expect(&e[0], i, IBV_WC_SUCCESS);
	uninject(id, 2, 2);

	id = inject(NULL, "delay:us=1,op=rdma_write_with_imm");
	CHECK(post_recv(&e[1], 10, 0, 8) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE_WITH_IMM, 2, 0, 8, &e[1], 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[0], 2, IBV_WC_SUCCESS);
	expect(&e[1], 10, IBV_WC_SUCCESS);
	uninject(id, 1, 1);

	snprintf(rule, sizeof(rule), "delay:us=1,qp=%u", e[1].qp->qp_num);
	id = inject(NULL, rule);
	uint64_t of_context = inject(&e[0], "delay:us=1"), elsewhere = inject(NULL, "delay:us=1,dev=soft1");
	uint64_t here = inject(NULL, "delay:us=1,dev=soft0");
	CHECK(post(&e[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &e[1], 0) == 0);
	CHECK(post(&e[1], IBV_WR_RDMA_WRITE, 2, 0, 8, &e[0], 0) == 0);
	expect(&e[0], 1, IBV_WC_SUCCESS);
	expect(&e[1], 2, IBV_WC_SUCCESS);
	CHECK(softnic_inject_stats(here, &matched, &hit) == 0 && matched == 2);
	uninject(id, 1, 1);
	uninject(of_context, 1, 1);
	uninject(elsewhere, 0, 0);
	CHECK(softnic_inject_remove(here) == 0);
}

/* One of several queue pairs is hit, the others go on meanwhile. */
static void the_others_go_on(void)
{
	struct end f[2];
	char rule[64];
	pair_open(f, &o);
	snprintf(rule, sizeof(rule), "delay:ms=200,qp=%u", f[0].qp->qp_num);
	uint64_t id = inject(NULL, rule);
	double start = seconds();
	CHECK(post(&f[0], IBV_WR_RDMA_WRITE, 1, 0, 8, &f[1], 0) == 0);
	unsigned done = 0;
	while (seconds() - start < 0.1) {
		CHECK(post(&e[0], IBV_WR_RDMA_WRITE, done, 0, 8, &e[1], 0) == 0);
		expect(&e[0], done, IBV_WC_SUCCESS);
		done++;
	}
	CHECK(done > 100);
	expect_nothing(&f[0]);
	expect(&f[0], 1, IBV_WC_SUCCESS);
	uninject(id, 1, 1);
	pair_close(f);
}

static void refuse(const char *rules, const char *word)
{
	uint64_t id;
	int err = softnic_inject(NULL, rules, &id);
	const char *reason = softnic_reason();
	if (err != EINVAL || !strstr(reason, word)) {
		fprintf(stderr, "'%s': errno %d, reason '%s' without '%s'\n", rules, err, reason, word);
		exit(1);
	}
}

static void refusals(void)
{
	refuse("", "no fault rule");
	refuse(" ; ", "no fault rule");
	refuse("dorp:p=0.1", "begins with dorp");
	refuse("delay", "how long");
	refuse("delay:us", "KEY=VALUE");
	refuse("delay:us=", "us=");
	refuse("delay:us=fast", "us=fast");
	refuse("delay:us=-1", "us=-1");
	refuse("delay:us=1e3", "us=1e3");
	refuse("delay:s=100000", "s=100000");
	refuse("drop:us=5", "takes no us=");
	refuse("drop:p=1.5", "p=1.5");
	refuse("drop:p=1.2.3", "p=1.2.3");
	refuse("drop:p=nan", "p=nan");
	refuse("drop:seed=-1", "seed=-1");
	refuse("drop:seed=99999999999999999999", "seed=999");
	refuse("drop:times=0", "never act");
	refuse("drop:lost=0", "lost=0");
	refuse("delay:us=1,lost=2", "lost=2");
	refuse("drop:qp=0", "qp=0");
	refuse("drop:qp=16777216", "qp=16777216");
	refuse("drop:dev=mlx5_0", "dev=mlx5_0");
	refuse("drop:op=fly", "op=fly");
	refuse("drop:op=send+fly", "op=fly");
	refuse("rnr:op=rdma_read", "cannot happen to op=rdma_read");
	refuse("drop:op=recv", "cannot happen to op=recv");
	refuse("drop:often=1", "often");
	refuse("delay:us=1;drop:p=2", "\"drop:p=2\"");
	refuse("IBV_WC_SUCCESS", "IBV_WC_SUCCESS");
	char *longer = malloc(6000);
	memset(longer, ';', 5999);
	longer[5999] = 0;
	refuse(longer, "4096 bytes");
	free(longer);

	uint64_t ids[64], one;
	for (unsigned i = 0; i < 64; i++)
		ids[i] = inject(NULL, "drop:after=1000000");
	CHECK(softnic_inject(NULL, "drop", &one) == ENOSPC && strstr(softnic_reason(), "remove some"));
	for (unsigned i = 0; i < 64; i++)
		CHECK(softnic_inject_remove(ids[i]) == 0);
	CHECK(softnic_inject_remove(0) == ENOENT);
}

int main(void)
{
	o = usual;
	pair_open(e, &o);
	counts_and_seeds();
	of_several_the_first_acts();
	filters();
	the_others_go_on();
	refusals();
	expect_nothing(&e[0]);
	pair_close(e);
	return 0;
}
