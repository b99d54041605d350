/* The system refuses process_vm, to one side or to both: sends, writes, reads and atomics arrive all
 * the same, in both directions, with the peer outside the library in between. One line on stderr says
 * so; the helper thread exists only then, and goes with the device. ROCECOMM_SOFT_STAGING=0 forbids. */
#include "process.h"
#include "refuse.h"

enum { SIZE = 700001, ROUNDS = 6 };
enum when { NEVER, EARLY, LATE }; /* late: after the device was opened, so nobody can know */

const char *softnic_reason(void);

static void sync_with(int in, int out)
{
	char c = 0;
	put(out, &c, 1);
	take(in, &c, 1);
}

static void exchange(struct end *e, struct hello you, int in, int out)
{
	struct end far = { .buf = (char *)(uintptr_t)you.addr, .mr = &(struct ibv_mr){ .rkey = you.rkey } };
	for (unsigned i = 0; i < ROUNDS; i++) {
		size_t n = i % 2 ? SIZE : (i + 1) * 300;
		CHECK(post_recv(e, 1, SIZE, SIZE) == 0);
		sync_with(in, out);
		pattern(e->buf, n, i);
		CHECK(post(e, IBV_WR_SEND, 2, 0, n, NULL, 0) == 0);
		CHECK(wait_wc(e).status == IBV_WC_SUCCESS && wait_wc(e).status == IBV_WC_SUCCESS);
		CHECK(same(e->buf + SIZE, n, i));
		sync_with(in, out);
		pattern(e->buf, n, i + 7);
		CHECK(post(e, IBV_WR_RDMA_WRITE, 3, 0, n, &far, 2 * SIZE) == 0);
		CHECK(post(e, IBV_WR_RDMA_READ, 4, 3 * SIZE, n, &far, 2 * SIZE) == 0);
		expect(e, 3, IBV_WC_SUCCESS);
		expect(e, 4, IBV_WC_SUCCESS);
		CHECK(same(e->buf + 3 * SIZE, n, i + 7));
		for (uint64_t k = 0; k < 50; k++) {
			CHECK(post_atomic(e, IBV_WR_ATOMIC_FETCH_AND_ADD, 5, 0, &far, 4 * SIZE + 4, 3, 0) == 0);
			expect(e, 5, IBV_WC_SUCCESS);
			CHECK(*(uint64_t *)(void *)e->buf == 151 * i + 3 * k);
		}
		CHECK(post_atomic(e, IBV_WR_ATOMIC_CMP_AND_SWP, 6, 0, &far, 4 * SIZE + 4, 151 * i + 150, 151 * (i + 1)) == 0);
		expect(e, 6, IBV_WC_SUCCESS);
		CHECK(*(uint64_t *)(void *)e->buf == 151 * i + 150);
		sync_with(in, out); /* whoever is done first waits outside the library */
	}
}

static void open_end(struct end *e, const struct options *o, enum when refused)
{
	if (refused == EARLY)
		refuse_process_vm();
	end_open(e, o);
	if (refused == LATE)
		refuse_process_vm();
}

static void one_end(enum when refused, int in, int out)
{
	struct options o = usual;
	struct end e;
	int before = threads();
	o.len = 5 * SIZE + 3;
	alarm(25);
	open_end(&e, &o, refused);
	CHECK(threads() == before);
	struct hello you = meet(&e, &o, in, out);
	exchange(&e, you, in, out);
	printf("threads +%d\n", threads() - before); /* read by main */
	fflush(stdout);
	end_close(&e);
	CHECK(threads() == before);
	_exit(0);
}

/* Both ends as children, since a filter cannot be taken away. Returns the number of lines that said
 * so; *helpers: how many helper threads there were. */
static int run(enum when a, enum when b, int *helpers)
{
	int ab[2], ba[2], words[2], lines = 0;
	char text[8192];
	size_t got = 0;
	CHECK(pipe(ab) == 0 && pipe(ba) == 0 && pipe(words) == 0);
	pid_t pid[2];
	for (int i = 0; i < 2; i++) {
		CHECK((pid[i] = fork()) >= 0);
		if (pid[i] == 0) {
			CHECK(dup2(words[1], 1) == 1 && dup2(words[1], 2) == 2);
			close(words[1]);
			one_end(i ? b : a, i ? ab[0] : ba[0], i ? ba[1] : ab[1]);
		}
	}
	close(words[1]);
	for (ssize_t n; got < sizeof(text) - 1 && (n = read(words[0], text + got, sizeof(text) - 1 - got)) > 0;)
		got += (size_t)n;
	text[got] = 0;
	*helpers = 0;
	for (char *p = text; (p = strstr(p, "threads +")); p++)
		*helpers += atoi(p + 9);
	for (char *p = text; (p = strstr(p, "softnic: ")); p++)
		lines++;
	for (int i = 0; i < 2; i++) {
		int status;
		CHECK(waitpid(pid[i], &status, 0) == pid[i]);
		if (status)
			fputs(text, stderr);
		CHECK(status == 0);
	}
	close(words[0]);
	for (int i = 0; i < 2; i++) {
		close(ab[i]);
		close(ba[i]);
	}
	return lines;
}

static void forbidden(void)
{
	int ab[2], ba[2];
	CHECK(pipe(ab) == 0 && pipe(ba) == 0);
	for (int i = 0; i < 2; i++) {
		pid_t pid = fork();
		struct end e;
		uint32_t qpn;
		CHECK(pid >= 0);
		if (pid)
			continue;
		setenv("ROCECOMM_SOFT_STAGING", "0", 1);
		alarm(25);
		open_end(&e, &usual, EARLY);
		int before = threads();
		put(i ? ba[1] : ab[1], &e.qp->qp_num, sizeof(qpn));
		take(i ? ab[0] : ba[0], &qpn, sizeof(qpn));
		CHECK(to_rts(&e, qpn, &usual) == EPERM);
		CHECK(strstr(softnic_reason(), "ROCECOMM_SOFT_STAGING=0"));
		CHECK(threads() == before);
		sync_with(i ? ab[0] : ba[0], i ? ba[1] : ab[1]);
		end_close(&e);
		_exit(0);
	}
	for (int i = 0; i < 2; i++) {
		int status;
		CHECK(wait(&status) > 0 && status == 0);
	}
}

int main(void)
{
#ifdef __SANITIZE_THREAD__
	puts("the thread sanitizer does not see what orders two processes");
	return 77;
#endif
	int helpers;
	unsetenv("ROCECOMM_SOFT_STAGING");
	CHECK(run(NEVER, NEVER, &helpers) == 0 && helpers == 0);
	CHECK(run(EARLY, EARLY, &helpers) == 2 && helpers == 2); /* each process says it */
	CHECK(run(EARLY, NEVER, &helpers) == 1 && helpers == 2);
	CHECK(run(NEVER, EARLY, &helpers) == 1 && helpers == 2);
	CHECK(run(LATE, LATE, &helpers) == 2 && helpers == 2);
	CHECK(run(LATE, NEVER, &helpers) == 1 && helpers == 2);
	forbidden();
	return 0;
}
